"""What each operator of a graph costs: FLOPs and moved bytes as expressions in the rows.

In: fx nodes with fake tensors in meta["val"], and the names of the values that need a gradient. Out:
`OperatorCost`s, whose seconds are those of planner/cost/pricing.py. Matrix products, convolutions and
attention are counted in FLOPs; everything else is as long as its bytes take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from rannc_backend.ir.block_graph import OperatorCost
from rannc_backend.passes.kept_functions import inner_work
from rannc_backend.planner.cost.tensor_sizes import numel, shape_of, value_bytes

VIEW_OPERATORS = frozenset(
    "alias as_strided chunk detach diagonal expand getitem lift_fresh movedim narrow permute reshape select "
    "slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as _reshape_alias "
    "_unsafe_view".split()
)
MATRIX_OPERATORS = frozenset(
    "addbmm addmm addmv baddbmm bmm convolution convolution_backward dot linear matmul mm mv".split()
)
CONVOLUTION_OPERATORS = frozenset({"convolution", "convolution_backward"})
ATTENTION_OPERATORS = frozenset(
    "_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention".split()
)
ATTENTION_BACKWARD_OPERATORS = frozenset(
    "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward".split()
)
REDUCTION_OPERATORS = frozenset(
    "all amax amin any argmax argmin max mean min native_group_norm native_layer_norm norm prod sum std var "
    "var_mean _log_softmax _softmax".split()
)
# Neither fused with what makes their inputs nor with what reads their results.
SEPARATE_OPERATORS = frozenset(
    "cumprod cumsum embedding_dense_backward index_put max_pool2d_with_indices "
    "max_pool2d_with_indices_backward native_batch_norm native_batch_norm_backward scatter scatter_add "
    "scatter_reduce sort topk _embedding_bag _unsafe_index_put".split()
)
LOOKUP_OPERATORS = frozenset("embedding gather index index_select".split())
_ATTENTION_BACKWARD_FACTOR = sympy.Rational(
    5, 2
)  # dQ, dK, dV, dP and the product QK^T again, for two in forward
# Of operators whose backward computes them again: those of passes/recurrent.py, and code that runs as written.
_RECURRENT, _COMPUTED_AGAIN_FACTOR = "layers", 3


def operator_name(node: fx.Node) -> str:
    """ "mm" for torch.ops.aten.mm.default, "getitem" for operator.getitem; "" for an input, whatever it is
    called.
    """
    if node.op != "call_function":
        return ""
    text = str(node.target)
    if text.startswith("<") or "." not in text:
        return getattr(node.target, "__name__", text)
    return text.split(".")[1]


def operator_class(name: str) -> str:
    """Which of a device's efficiencies holds for an operator, by its `operator_name`."""
    if name in ATTENTION_OPERATORS or name in ATTENTION_BACKWARD_OPERATORS:
        return "attention"
    if name in CONVOLUTION_OPERATORS:
        return "convolution"
    return "matmul" if name in MATRIX_OPERATORS else "elementwise"


def operator_cost(
    node: fx.Node, needs_grad: Collection[str], *, unwritten: Collection[str] = ()
) -> OperatorCost:
    """Cost of one call_function node.

    Args:
        needs_grad: names of nodes whose value gets a gradient.
        unwritten: names of nodes whose value never comes to memory, because it is computed inside of the
        kernels that read it.
    """
    name = operator_name(node)
    value = node.meta.get("val")
    zero = sympy.Integer(0)
    free = name in VIEW_OPERATORS or value is None
    backward = not free and (
        node.name in needs_grad or any(taken in needs_grad for taken in _getitem_names(node))
    )
    segments, inside = _segments_flops(name, node), _inside_flops(node)
    flops = next((each for each in (inside, segments) if each is not None), None)
    if flops is None:
        flops = _forward_flops(name, node)
    forward_bytes = zero if free else _forward_bytes(name, node, unwritten)
    operands = [argument for argument in node.all_input_nodes if argument.name in needs_grad]
    if flops == 0:
        backward_flops = zero
    elif name in ATTENTION_OPERATORS:
        backward_flops = flops * _ATTENTION_BACKWARD_FACTOR
    elif name == _RECURRENT or inside is not None:
        backward_flops = flops * _COMPUTED_AGAIN_FACTOR
    elif segments is not None:
        backward_flops = flops * max(1, len(operands))
    else:
        backward_flops = flops * max(1, len(_matrix_operands(name, operands, node)))
    backward_bytes = forward_bytes
    if name in LOOKUP_OPERATORS and operands:
        # The gradient of a table is dense: all of it is written, not only the rows that were read.
        backward_bytes = forward_bytes + value_bytes(operands[0].meta.get("val"))
    has_weights = backward and flops != 0 and name not in ATTENTION_OPERATORS
    factors = _matrix_operands(name, operands, node) if has_weights else []
    weights = [factor for factor in factors if not _has_rows(factor)]
    return OperatorCost(
        name=node.name,
        dtype=_dtype_name(value),
        operator_class=operator_class(name) if segments is None and not inside else "matmul",
        forward_flops=flops,
        backward_flops=backward_flops if backward else zero,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes if backward else zero,
        num_forward_launches=0 if free else 1,
        num_backward_launches=(2 if flops != 0 else 1) if backward else 0,
        weight_flops=flops * len(weights),
        # The other factor of the product, and the gradient of its result.
        kept_bytes=sympy.Add(
            value_bytes(value),
            *(value_bytes(each.meta.get("val")) for each in node.all_input_nodes if _has_rows(each)),
        )
        if weights
        else zero,
    )


def _has_rows(node: fx.Node) -> bool:
    """Whether a value's size depends on the batch: those of parameters do not."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(size.free_symbols for size in shape_of(value))


def _getitem_names(node: fx.Node) -> set[str]:
    """Gradients reach an operator with several results through the getitems that take them."""
    return (
        {user.name for user in node.users if operator_name(user) == "getitem"} if _is_tuple(node) else set()
    )


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _dtype_name(value: object) -> str:
    if isinstance(value, list | tuple):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "int64"


def _value(argument: object) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _forward_bytes(name: str, node: fx.Node, unwritten: Collection[str]) -> sympy.Expr:
    whole = value_bytes(node.meta.get("val"))
    result = sympy.Integer(0) if node.name in unwritten else whole
    if name in LOOKUP_OPERATORS:
        return whole + result
    sources = (before_expand(argument) for argument in node.all_input_nodes if argument.name not in unwritten)
    return result + sympy.Add(*(value_bytes(source.meta.get("val")) for source in sources))


def before_expand(node: fx.Node) -> fx.Node:
    """The node whose memory is really read: expand repeats it without a copy."""
    while operator_name(node) == "expand" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _matrix_operands(name: str, operands: Sequence[fx.Node], node: fx.Node) -> list[fx.Node]:
    """Those of `operands` for whose gradient a product is needed (the bias of an addmm or a convolution is
    not one).
    """
    bias = (
        0
        if name in {"addmm", "baddbmm", "addbmm", "addmv"}
        else 2
        if name in {"convolution", "linear"}
        else None
    )
    skipped = node.args[bias] if bias is not None and bias < len(node.args) else None
    return [operand for operand in operands if operand is not skipped]


def _forward_flops(name: str, node: fx.Node) -> sympy.Expr:
    if name in ATTENTION_OPERATORS:
        query, key, value = (shape_of(_value(argument)) for argument in node.args[:3])
        batch_heads = sympy.Mul(*query[:-2])
        return 2 * batch_heads * query[-2] * key[-2] * (query[-1] + value[-1])
    if name in ATTENTION_BACKWARD_OPERATORS:
        query, key, value = (shape_of(_value(argument)) for argument in node.args[1:4])
        forward = 2 * sympy.Mul(*query[:-1]) * key[-2] * (query[-1] + value[-1])
        return forward * _ATTENTION_BACKWARD_FACTOR
    formula = _FLOPS.get(name)
    return sympy.Integer(0) if formula is None else formula(node)


def _inside_flops(node: fx.Node) -> sympy.Expr | None:
    """Of an operator that calls code as it is written; for its gradient the code runs once more."""
    found = inner_work(node)
    if found is None:
        return None
    work, num_elements, is_gradient = found
    flops = sympy.Integer(round(work.flops)) * num_elements
    return flops * _COMPUTED_AGAIN_FACTOR if is_gradient else flops


def _segments_flops(name: str, node: fx.Node) -> sympy.Expr | None:
    """Of a product of segments by the weights of their keys (tokens by experts): torch's own, or an operator of a
    library that gets rows [S, K], weights [E, K, N] and ends [E], whatever its name; None for another operator.
    """
    if name == "_grouped_mm":
        left, right = (shape_of(_value(argument)) for argument in node.args[:2])
        return 2 * sympy.Mul(*left) * right[-1]
    if str(node.target).startswith(("aten.", "<")):
        return None
    tensors = [value for item in node.args if isinstance(value := _value(item), torch.Tensor)]
    whole = [value for value in tensors if value.is_floating_point()]
    ends = [value for value in tensors if not value.is_floating_point()]
    if len(whole) not in (2, 3) or [value.dim() for value in whole[:2]] != [2, 3] or len(ends) != 1:
        return None
    (num_rows, inner), (num_keys, depth, width) = shape_of(whole[0]), shape_of(whole[1])
    if inner != depth or shape_of(ends[0]) != (num_keys,):
        return None
    # With the gradient of the result beside them: two products.
    return 2 * num_rows * inner * width * (len(whole) - 1)


def _product_flops(first: int) -> Callable[[fx.Node], sympy.Expr]:
    """2 x elements of the result x the contracted size, which is the last dimension of argument number
    `first`.
    """

    def flops(node: fx.Node) -> sympy.Expr:
        return 2 * numel(node.meta["val"]) * shape_of(_value(node.args[first]))[-1]

    return flops


def _batch_sum_flops(node: fx.Node) -> sympy.Expr:
    left, right = shape_of(_value(node.args[1])), shape_of(_value(node.args[2]))
    return 2 * sympy.Mul(*left) * right[-1]


def _convolution_flops(node: fx.Node) -> sympy.Expr:
    inputs, weight = _value(node.args[0]), shape_of(_value(node.args[1]))
    transposed = bool(node.args[6]) if len(node.args) > 6 else False
    # Each element of the result (of the input, if transposed) meets a filter: all of the weight but its first
    # dimension.
    meeting = inputs if transposed else node.meta["val"]
    return 2 * numel(meeting) * sympy.Mul(*weight[1:])


def _convolution_backward_flops(node: fx.Node) -> sympy.Expr:
    gradient, inputs, weight = (_value(argument) for argument in node.args[:3])
    transposed, wanted = bool(node.args[7]), node.args[10]
    product = 2 * numel(inputs if transposed else gradient) * sympy.Mul(*shape_of(weight)[1:])
    assert isinstance(wanted, list | tuple), "which gradients are wanted is a list"
    return product * sum(bool(item) for item in wanted[:2])


def _recurrent_flops(first: int) -> Callable[[fx.Node], sympy.Expr]:
    """Every weight meets every token, of argument number `first`."""

    def flops(node: fx.Node) -> sympy.Expr:
        tokens = sympy.Mul(*shape_of(_value(node.args[first]))[:-1])
        weights: Any = node.args[first + 2]
        return (
            2 * tokens * sympy.Add(*(numel(_value(weight)) for weight in weights if _value(weight).dim() > 1))
        )

    return flops


_FLOPS: dict[str, Callable[[fx.Node], sympy.Expr]] = {
    "mm": _product_flops(0),
    "bmm": _product_flops(0),
    "mv": _product_flops(0),
    "dot": _product_flops(0),
    "matmul": _product_flops(0),
    "linear": _product_flops(0),
    "addmm": _product_flops(1),
    "addmv": _product_flops(1),
    "baddbmm": _product_flops(1),
    "addbmm": _batch_sum_flops,
    "convolution": _convolution_flops,
    "convolution_backward": _convolution_backward_flops,
    _RECURRENT: _recurrent_flops(1),
    f"{_RECURRENT}_backward": lambda node: _COMPUTED_AGAIN_FACTOR * _recurrent_flops(2)(node),
}
