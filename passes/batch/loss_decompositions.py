"""Write means, norms and losses over the batch as sums and what follows the sums, and the batch size as a
number as a tensor.

In: a functional ATen graph with symbolic batch size. Out: the same graph, changed in place, in which
- the only reductions over the batch dimension are `aten.sum` (and those that batch_axis.py refuses);
- where the batch size is used as a number and not as a shape, it comes from a new placeholder "global_rows"
  (0-dim int64), the number of rows of the global batch: `x / x.size(0)` means all rows, not those of a slice;
- sizes that are a multiple of the batch size are read from an input, so that no value is needed for its shape
  alone;
- factories take no tensor (`x.new_full` is `full`), so that any stage may make what they give;
- dtype assertions, which compute nothing, are gone, and `aten.copy`, which has no derivative, is an expansion
  of its source.

Sums of half-precision values are taken in float32 and cast back after the sum over slices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

from rannc_backend.passes.batch.batch_split import GLOBAL_ROWS
from rannc_backend.passes.batch.operator_call import (
    Call,
    has_rows,
    operator_name,
    rows_dims,
    rows_multiple,
    wrap_dims,
)
from rannc_backend.passes.canonicalize import CANONICAL
from rannc_backend.passes.data_sizes import mask_of
from rannc_backend.passes.graph_queries import (
    arguments_of,
    fake_mode_of,
    overload_of,
    placeholders,
    size_expression,
)
from rannc_backend.passes.pipeline import GraphPass, PassError
from rannc_backend.passes.size_nodes import length_placeholders, size_node
from rannc_backend.passes.tracing import inline, inline_value, trace_function

HALF = (torch.float16, torch.bfloat16)
NO_REDUCTION = 0

#: operators without effect on values
ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "_functional_assert_async",
    "sym_constrain_range",
)


@dataclass(frozen=True, slots=True)
class DecomposeReductions(GraphPass):
    """See the module docstring. Refuses graphs that use the batch size in a way that cannot be rewritten, but where
    rows are `together`: the size of the one slice is that of the whole batch.
    """

    name: ClassVar[str] = "decompose_reductions"
    requires: ClassVar[frozenset[str]] = CANONICAL
    provides: ClassVar[frozenset[str]] = frozenset({"sums_only"})
    rows_symbol: sympy.Symbol
    together: bool = False

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return decompose_batch_reductions(graph_module, self.rows_symbol, together=self.together)


def decompose_batch_reductions(
    graph_module: fx.GraphModule, rows_symbol: sympy.Symbol, *, together: bool = False
) -> fx.GraphModule:
    """Rewrite as the module says; the caller recompiles. Raises PassError where the batch size is used in a
    way that cannot be rewritten.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_name(node.target).removeprefix("aten.") in ASSERTIONS and not node.users:
            graph.erase_node(node)
    pending = list(graph.nodes)[::-1]
    while pending:
        node = pending.pop()
        function = _decomposition(node, rows_symbol)
        if function is not None:
            new_nodes = inline(node, trace_function(function, node.args, node.kwargs))
            pending.extend(reversed(new_nodes))
    _RowNumbers(graph_module, rows_symbol, together=together).replace()
    _read_sizes_from_inputs(graph, rows_symbol)
    graph.eliminate_dead_code()
    return graph_module


def _read_sizes_from_inputs(graph: fx.Graph, symbol: sympy.Symbol) -> None:
    inputs = placeholders(graph)
    sources = [node for node in inputs if rows_dims(node.meta["val"], symbol) == [0]]
    known = length_placeholders(graph)
    begin = inputs[-1].next  # in front of which all sizes are
    if sources and rows_multiple(sources[0].meta["val"].shape[0], symbol) == 1:
        with graph.inserting_before(begin):
            known[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (sources[0], 0))
        known[symbol].meta["val"] = sources[0].meta["val"].shape[0]
    sizes: dict[sympy.Expr, fx.Node | int | float | None] = {}
    replaced = []  # erased last: `begin` may be one of them
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt) or node in known.values():
            continue
        expression = size_expression(value)
        if node.target is not torch.ops.aten.sym_size.int and not rows_multiple(value, symbol):
            continue
        if expression not in sizes:
            with graph.inserting_before(begin):
                sizes[expression] = size_node(graph, expression, known)
        made = sizes[expression]
        if made is not None:
            node.replace_all_uses_with(made)
            replaced.append(node)
    for node in reversed(replaced):
        graph.erase_node(node)


def _decomposition(node: fx.Node, symbol: sympy.Symbol) -> Callable[..., Any] | None:
    """The function that replaces the call, if it reduces the batch dimension."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = operator_name(node.target).removeprefix("aten.")
    if name == "copy":
        return _copy
    if name in FACTORIES:
        return _without_operand(node, FACTORIES[name])
    if name in LOSSES:
        call = Call.of(node, symbol, {})
        holds_rows = any(rows_dims(item.meta["val"], symbol) for item in call.tensors())
        per_element = name in ELEMENTWISE_LOSSES and call["reduction"] == NO_REDUCTION
        return decomposition_table[node.target] if holds_rows and not per_element else None
    if name not in REDUCTIONS:
        return None
    call = Call.of(node, symbol, {})
    source = call["self"].meta["val"]
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    if not set(rows_dims(source, symbol)) & set(wrap_dims(dims, source.ndim)):
        return None
    if name == "sum" and node.meta["val"].dtype not in HALF:
        return None
    return REDUCTIONS[name](node)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(target.dtype).expand(target.shape).clone()


def _without_operand(node: fx.Node, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    value = node.meta["val"]

    def run(x: Tensor, *sizes_and_number: Any, **ignored: Any) -> Tensor:
        return make(*sizes_and_number, dtype=value.dtype, device=value.device)

    return run


# --- reductions
# -----------------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _total(x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype) -> Tensor:
    dims = wrap_dims(dim, x.ndim)
    return torch.ops.aten.sum.dim_IntList(x, dims, keepdim, dtype=None if x.dtype == dtype else dtype)


def _count(x: Tensor, dim: Any) -> Any:
    count: Any = 1
    for one in wrap_dims(dim, x.ndim):
        count = count * x.shape[one]
    return count


def _sum(node: fx.Node) -> Callable[..., Tensor]:
    out = node.meta["val"].dtype

    def run(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return _total(x, dim, keepdim, _wide(out)).to(out)

    return run


def _mean(node: fx.Node) -> Callable[..., Tensor]:
    out = node.meta["val"].dtype

    def run(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return (_total(x, dim, keepdim, _wide(out)) / _count(x, dim)).to(out)

    return run


def _moments(x: Tensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance from sums; in float64, where the difference of squares keeps its digits."""
    x64 = x.to(torch.float64)
    count = _count(x, dim)
    mean = _total(x64, dim, keepdim, torch.float64) / count
    squares = _total(x64 * x64, dim, keepdim, torch.float64)
    scale = count - (1 if correction is None else correction)
    return mean, torch.clamp((squares - mean * mean * count) / scale, min=0)


def _variance(node: fx.Node) -> Callable[..., Any]:
    name = operator_name(node.target).removeprefix("aten.")

    def run(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        mean, variance = _moments(x, dim, correction, keepdim)
        spread = (variance if name.startswith("var") else torch.sqrt(variance)).to(x.dtype)
        return (spread, mean.to(x.dtype)) if name.endswith("_mean") else spread

    return run


def _safe_root(total: Tensor, power: float) -> Tensor:
    """total ** (1 / power), with gradient 0 at 0 as torch's norms have it."""
    zero = total == 0
    safe = torch.where(zero, torch.ones_like(total), total)
    root = torch.sqrt(safe) if power == 2 else safe ** (1 / power)
    return torch.where(zero, torch.zeros_like(total), root)


def _norm(node: fx.Node) -> Callable[..., Tensor] | None:
    out = node.meta["val"].dtype
    call = Call.of(node, sympy.Symbol("unused"), {})
    power = call.arguments.get("ord", call.arguments.get("p"))
    power = 2 if power is None else power
    if not isinstance(power, (int, float)) or power in (0, float("inf"), float("-inf")):
        return None
    dim, keepdim = call.arguments.get("dim"), bool(call.arguments.get("keepdim"))

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wide = x.to(_wide(out))
        powers = wide.abs() if power == 1 else wide * wide if power == 2 else wide.abs() ** power
        total = _total(powers, dim, keepdim, _wide(out))
        return (total if power == 1 else _safe_root(total, power)).to(out)

    return run


def _any(node: fx.Node) -> Callable[..., Tensor]:
    def run(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return _total(x != 0, dim, keepdim, torch.int64) > 0

    return run


def _all(node: fx.Node) -> Callable[..., Tensor]:
    def run(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return _total(x == 0, dim, keepdim, torch.int64) == 0

    return run


def _count_nonzero(node: fx.Node) -> Callable[..., Tensor]:
    def run(x: Tensor, dim: Any = None) -> Tensor:
        return _total(x != 0, dim, False, torch.int64)

    return run


REDUCTIONS: dict[str, Callable[[fx.Node], Callable[..., Any] | None]] = {
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _variance),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    "any": _any,
    "all": _all,
    "count_nonzero": _count_nonzero,
}
ELEMENTWISE_LOSSES = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss",
)  # fmt: skip
#: operators that read nothing of their tensor but its type -> those without one
FACTORIES: dict[str, Callable[..., Tensor]] = {
    "new_full": torch.full,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_empty": torch.empty,
}
LOSSES = (*ELEMENTWISE_LOSSES, "nll_loss_forward", "nll_loss2d_forward", "dist")


# --- the batch size as a number
# -------------------------------------------------------------------------------------------

#: by name of the function on symbolic numbers
_ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "neg": torch.neg,
    "sym_float": lambda x: x.to(torch.float64),
    "sqrt": lambda x: torch.sqrt(x.to(torch.float64)),
    "sym_sqrt": lambda x: torch.sqrt(x.to(torch.float64)),
    "sym_max": torch.maximum,
    "sym_min": torch.minimum,
}


class _RowNumbers:
    """Replaces symbolic numbers that are no shapes by tensors computed from "global_rows"."""

    def __init__(self, graph_module: fx.GraphModule, symbol: sympy.Symbol, *, together: bool) -> None:
        self.graph = graph_module.graph
        self.symbol = symbol
        self.together = together
        self.tensors: dict[fx.Node, fx.Node] = {}

    def replace(self) -> None:
        for node in list(self.graph.nodes):
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            places = self._number_places(node)
            if places:
                self._rewrite(node, places)

    def _number_places(self, node: fx.Node) -> list[str]:
        """Names of the arguments that are numbers depending on the batch size."""
        name = operator_name(node.target)
        if (
            isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
            or name == "aten.arange"
        ):
            return []
        call = Call.of(node, self.symbol, {})
        found = []
        for argument in overload_of(node)._schema.arguments:
            value = call[argument.name]
            if not isinstance(value, fx.Node) or not has_rows(value.meta.get("val"), self.symbol):
                continue
            kind = str(argument.type)
            if (
                "Tensor" in kind
                or "number" in kind
                or "Scalar" in kind
                or kind in ("float", "Optional[float]")
            ):
                found.append(argument.name)
        return found

    def _rewrite(self, node: fx.Node, places: list[str]) -> None:
        call, value = Call.of(node, self.symbol, {}), node.meta["val"]
        name = call.name.removeprefix("aten.")
        numbers = {place: self._tensor(call[place]) for place in places}
        if name in ("full", "full_like", "scalar_tensor", "fill"):
            (number,) = numbers.values()
            shape = [self._size(node, dim) for dim in range(value.ndim)]
            inner = trace_function(lambda x, s: x.to(value.dtype).expand(s).clone(), (number, shape), {})
        else:
            overload = _tensor_overload(node, places)
            arguments = {**call.arguments, **numbers}
            given = {
                item.name: arguments[item.name]
                for item in overload._schema.arguments
                if arguments.get(item.name) is not None
            }
            inner = trace_function(lambda **kwargs: overload(**kwargs).to(value.dtype), (), given)
        inline(node, inner)

    def _size(self, node: fx.Node, dim: int) -> Any:
        """Size of the value of a factory as it stands in its arguments."""
        size = node.meta["val"].shape[dim]
        if not has_rows(size, self.symbol):
            return size
        if operator_name(node.target) == "aten.full":
            return Call.of(node, self.symbol, {})["size"][dim]
        source = Call.of(node, self.symbol, {})["self"]
        with self.graph.inserting_before(node):
            result = self.graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
        result.meta["val"] = size
        return result

    def _tensor(self, number: fx.Node) -> fx.Node:
        """A 0-dim tensor with the value that the number has for the global batch."""
        if number not in self.tensors:
            self.tensors[number] = self._compute(number)
        return self.tensors[number]

    def _compute(self, number: fx.Node) -> fx.Node:
        value = number.meta["val"]
        multiple = rows_multiple(value, self.symbol) if isinstance(value, torch.SymInt) else None
        if multiple == 1:
            return self._global_rows(value)
        if isinstance(multiple, sympy.Symbol) and (mask := self._mask_of(value)) is not None:
            return self._call(number, lambda mask: mask.sum(), (mask,))
        if multiple is not None:
            with self.graph.inserting_before(number):
                times = size_node(self.graph, multiple, length_placeholders(self.graph))
            if times is not None:
                return self._call(number, operator.mul, (self._global_rows(value), times))
        function = _ARITHMETIC.get(operator_name(number.target))
        if function is None and self.together:
            # The number itself, of the one slice: in float64 it is a sum of that slice, which may be asked for.
            return self._call(number, lambda size: torch.full((), size, dtype=torch.float64), (number,))
        if function is None:
            # A share of the batch, as of one half: samples that stand there need not meet. All but some are shifted.
            others = size_expression(value) - self.symbol
            raise PassError(
                number,
                f"operator {operator_name(number.target)} on the batch size cannot be rewritten for the "
                "global batch",
                is_known=self.symbol not in others.free_symbols,
            )
        depends = [
            isinstance(item, fx.Node) and has_rows(item.meta["val"], self.symbol) for item in number.args
        ]
        args = tuple(self._tensor(item) if row else item for item, row in zip(arguments_of(number), depends))
        return self._call(number, function, args)

    def _mask_of(self, size: torch.SymInt) -> fx.Node | None:
        """The mask that has chosen so many elements."""
        for node in self.graph.nodes:
            if (mask := mask_of(node)) is not None and node.meta["val"].shape[0].node.expr == size.node.expr:
                return mask
        return None

    def _call(self, after: fx.Node, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        marker_place = after.next
        with self.graph.inserting_before(marker_place):
            marker = self.graph.call_function(operator.pos, args)
        inner = trace_function(function, args, {}, mode=fake_mode_of(placeholders(self.graph)))
        marker.meta = {**after.meta, "val": inner.outputs[0].meta["val"]}
        return inline_value(marker, inner)

    def _global_rows(self, like: Any) -> fx.Node:
        inputs = placeholders(self.graph)
        for node in inputs:
            if node.name == GLOBAL_ROWS:
                return node
        with self.graph.inserting_after(inputs[-1]):
            node = self.graph.placeholder(GLOBAL_ROWS)
        with fake_mode_of(inputs):
            device = "cpu"
            node.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
        return node


def _tensor_overload(node: fx.Node, places: list[str]) -> Any:
    """The overload of the same operator that takes a tensor in the named places."""
    target = overload_of(node)
    packet, name = target.overloadpacket, target._overloadname
    schema = {item.name: str(item.type) for item in target._schema.arguments}
    if all("Tensor" in schema[place] for place in places):
        return target
    for candidate in (name.replace("Scalar", "Tensor"), "Tensor_Tensor", "Tensor"):
        if candidate in packet.overloads():
            overload = getattr(packet, candidate)
            types = {item.name: str(item.type) for item in overload._schema.arguments}
            if all("Tensor" in types.get(place, "") for place in places):
                return overload
    raise PassError(
        node,
        f"operator {operator_name(node.target)} uses the batch size as a number, and has no form that takes "
        "a tensor",
    )
