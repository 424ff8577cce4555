"""Operators that ask for a certain layout in memory, in forms that take any.

In: a graph that will run on other layouts than it was traced on: a boundary value has become contiguous, or
an operator lays its result out in another way than torch's own shape function said (batch normalisation and
some derivatives on the CPU). Out: the same values.

Most operators of torch read their operands by their strides. Three kinds do not. A view is a statement about
memory: it becomes a reshape. A kernel that torch chose after a look at the operands (attention, group
normalization) reads what it was chosen for, some of them without a check: a wrong number, or memory that is not
theirs. So does an operator of the user's. The operands of both are laid out as in the trace, by a copy only
where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from rannc_backend.passes.graph_queries import overload_of
from rannc_backend.passes.pipeline import GraphPass
from rannc_backend.passes.plain_numbers import hint_of, is_surely

aten = torch.ops.aten

_RESHAPED = frozenset({aten.view.default, aten._unsafe_view.default})
_OF_CONTIGUOUS = frozenset({aten.view_as_complex.default, aten.view.dtype})
# Found by `tests/benchmarks/operator_layouts.py`, beside those whose name begins with an underscore.
_READ_AS_TRACED = frozenset(
    {
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.nll_loss2d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d_backward.default,
    }
)
# Whose kernels read strides, though their names begin with an underscore.
_READ_BY_STRIDES = frozenset(
    {
        *(aten._to_copy.default, aten._conj.default, aten._neg_view.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(aten._unsafe_index.Tensor, aten._unsafe_index_put.default),
        *(aten._local_scalar_dense.default, aten._assert_scalar.default),
    }
)


@dataclass(frozen=True, slots=True)
class TakeAnyLayout(GraphPass):
    """See the module docstring. In place, so only on a graph that is nobody else's: the copy without
    constants.
    """

    name: ClassVar[str] = "any_layout"
    requires: ClassVar[frozenset[str]] = frozenset({"constants_lifted"})
    provides: ClassVar[frozenset[str]] = frozenset({"any_layout"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        take_any_layout(graph_module.graph)
        return graph_module


def take_any_layout(graph: fx.Graph) -> None:
    """Change the graph in place. The caller recompiles."""
    for node in list(graph.nodes):
        if node.target in _RESHAPED:
            node.target = aten.reshape.default
        elif node.target in _OF_CONTIGUOUS:
            with graph.inserting_before(node):
                operand = graph.call_function(aten.contiguous.default, (node.args[0],))
                operand.meta.update(node.args[0].meta)
            node.args = (operand, *node.args[1:])
        elif node.target is aten.as_strided.default:
            _restride(graph, node)
        elif isinstance(node.target, OpOverload) and reads_as_traced(node.target):
            _lay_out_operands(graph, node)


def reads_as_traced(operator: OpOverload) -> bool:
    """Whether a kernel may take for granted how its operands lie."""
    if operator.namespace == "aten":
        name = operator.overloadpacket.__name__
        return operator in _READ_AS_TRACED or (name.startswith("_") and operator not in _READ_BY_STRIDES)
    return operator.namespace not in ("prims", "rannc") and torch.Tag.flexible_layout not in operator.tags


def laid_out(value: Tensor, order: tuple[int, ...], dense: bool) -> Tensor:
    """The tensor itself where its dimensions lie in this order, the outermost first and the innermost side by
    side, and without gaps where `dense`; else a copy without gaps.
    """
    ordered = value.permute(order)
    if not dense:
        lie = [step for n, step in zip(ordered.shape, ordered.stride(), strict=True) if not is_surely(n == 1)]
        falls = all(is_surely(step >= after) for step, after in zip(lie, lie[1:], strict=False))
        if falls and all(is_surely(step == 1) for step in lie[-1:]):
            return value
    elif ordered.is_contiguous():
        return value
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return ordered.contiguous().permute(inverse)


def _lay_out_operands(graph: fx.Graph, node: fx.Node) -> None:
    """Of an operator that takes their layout for granted; those that it writes stay what they are."""
    arguments = overload_of(node)._schema.arguments
    written = {argument.name for argument in arguments if argument.is_write}

    def operand(value: fx.Node) -> fx.Node:
        order = _order_of(value.meta.get("val"))
        if order is None:
            return value
        with graph.inserting_before(node):
            copy = graph.call_function(laid_out, (value, *order))
            copy.meta.update(value.meta)
        return copy

    positional = [
        value if argument.name in written else fx.map_arg(value, operand)
        for value, argument in zip(node.args, arguments, strict=False)
    ]
    named = {name: v if name in written else fx.map_arg(v, operand) for name, v in node.kwargs.items()}
    node.args, node.kwargs = tuple(positional), named


def _order_of(fake: Any) -> tuple[tuple[int, ...], bool] | None:
    """The dimensions of a fake tensor from the outermost to the innermost, and whether there are no gaps;
    None where there is nothing to keep: one dimension, or values that are repeated.
    """
    if not isinstance(fake, Tensor) or fake.layout is not torch.strided:
        return None
    sizes, steps = ([hint_of(number) for number in numbers] for numbers in (fake.shape, fake.stride()))
    long = [dim for dim, size in enumerate(sizes) if size != 1]
    if not long or any(steps[dim] in (None, 0) for dim in long):
        return None
    order = sorted(range(len(sizes)), key=lambda dim: steps[dim] if dim in long else 0, reverse=True)
    inner = [dim for dim in order if dim in long]
    if steps[inner[-1]] != 1:
        return None
    dense = all(
        sizes[after] is not None and steps[dim] == steps[after] * sizes[after]
        for dim, after in zip(inner, inner[1:], strict=False)
    )
    return tuple(order), dense


def restrided(value: Tensor, strides: list[int]) -> Tensor:
    """The tensor itself where it has these strides (those of dimensions of one element mean nothing), else a
    copy that has them.
    """
    if all(
        size == 1 or have == want
        for size, have, want in zip(value.shape, value.stride(), strides, strict=True)
    ):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _restride(graph: fx.Graph, node: fx.Node) -> None:
    """`aten.as_strided` counts in the memory of its operand, which must lie as it did in the trace."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node.format_node()
    fake = source.meta.get("val")
    if isinstance(fake, Tensor) and all(isinstance(stride, int) for stride in fake.stride()):
        with graph.inserting_before(node):
            operand = graph.call_function(restrided, (source, list(fake.stride())))
            operand.meta.update(source.meta)
        node.args = (operand, *node.args[1:])
