"""Sizes, and Python's floats that change between calls, as nodes of a graph.

In: an expression over the batch size and the lengths, and the nodes that hold those. Out: a node that computes
it. Terms: a *length* is a size other than the batch size that differs between calls; a graph has a placeholder
with a number for each of its lengths. Floats become tensors of one element, which batch passes and stages know.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from rannc_backend.passes.graph_queries import fake_mode_of, placeholders, size_expression, symbols_in
from rannc_backend.passes.pipeline import Pass
from rannc_backend.passes.plain_numbers import is_surely

aten = torch.ops.aten

Size: TypeAlias = "int | sympy.Expr"
"""A number of elements: an int, or an expression over lengths."""

#: By name: torch has classes of its own beside those of sympy.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
}
_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "ToFloat": torch.sym_float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
}


def length_placeholders(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The placeholders of lengths, by symbol."""
    return {
        node.meta["val"].node.expr: node
        for node in placeholders(graph)
        if isinstance(node.meta.get("val"), torch.SymInt)
    }


def exact_quotient(number: Size, divisor: Size) -> Size | None:
    """number / divisor, where that is whole for all lengths; else None."""
    if divisor == 0:
        return None
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor if number % divisor == 0 else None
    ratio = sympy.cancel(sympy.sympify(number) / sympy.sympify(divisor))
    return plain(ratio) if sympy.denom(ratio) == 1 else None


def plain(expression: Any) -> Size:
    """An int where it is one, else the expanded expression, in which equal sizes are equal."""
    expanded = sympy.expand(sympy.sympify(expression))
    return int(expanded) if expanded.is_Integer else expanded


def number_of(expression: sympy.Expr, symbols: Sequence[sympy.Symbol], numbers: Sequence[Any]) -> Any:
    """The expression with these numbers, plain or symbolic, in place of its symbols."""
    return sympy.lambdify(symbols, expression, modules=[_OPERATORS, _OF_ONE])(*numbers)


def plain_at(size: Size, known: Mapping[sympy.Symbol, sympy.Expr]) -> Size:
    """A size with these expressions in place of symbols."""
    return size if isinstance(size, int) else plain(size.xreplace(known))


def size_node(
    graph: fx.Graph, expression: Any, known: Mapping[sympy.Symbol, fx.Node]
) -> fx.Node | int | float | None:
    """The expression's value from the nodes of its symbols, made where the graph inserts; None where an operator
    of it is not known, or a symbol.
    """
    value = size_expression(expression)
    if value.is_Integer:
        return int(value)
    if value.is_Float:
        return float(value)
    if value in known:
        return known[value]
    function: Callable[..., Any]
    if value.is_Pow and value.exp.is_Integer and value.exp > 0:
        parts, function = [value.base] * int(value.exp), operator.mul
    elif type(value).__name__ in _OF_ONE:
        parts, function = list(value.args), _OF_ONE[type(value).__name__]
    elif type(value).__name__ in _OPERATORS:
        parts, function = list(value.args), _OPERATORS[type(value).__name__]
    else:
        return None
    operands = [size_node(graph, part, known) for part in parts]
    if any(operand is None for operand in operands):
        return None
    if type(value).__name__ in _OF_ONE:
        return _applied(graph, function, *operands)
    return functools.reduce(functools.partial(_applied, graph, function), operands)


def _applied(graph: fx.Graph, function: Callable[..., Any], *operands: Any) -> fx.Node:
    made = graph.call_function(function, operands)
    made.meta["val"] = function(
        *(item.meta["val"] if isinstance(item, fx.Node) else item for item in operands)
    )
    return made


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is a number (a batch size or arithmetic on it), not a tensor."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(
        value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def size_symbols(node: fx.Node) -> set[sympy.Symbol]:
    """In the sizes of a node's value, and in those that it takes."""
    sizes = [argument.meta["val"] for argument in node.all_input_nodes if is_size(argument)]
    return symbols_in([node.meta.get("val"), *sizes])


# --- Python's floats


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutFloats:
    """`needed`: names of the placeholders of floats that something needs as numbers (a size, an operator without an
    overload for tensors); where there are any, the graph is of no use.
    """

    graph_module: fx.GraphModule
    needed: frozenset[str]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        """The one graph."""
        return {"": self.graph_module}


@dataclass(frozen=True, slots=True)
class FloatsAsTensors(Pass[WithoutFloats]):
    """Let tensors of one element take the place of floats that change between calls; results keep their types.

    ``tensors``: the placeholder of each float -> that of its tensor, [] in float64, by name. Arithmetic of floats becomes
    the same of tensors. An operator gets the tensor where an overload of it takes one.
    """

    name: ClassVar[str] = "floats_as_tensors"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"no_floats"})
    tensors: Mapping[str, str]

    def run(self, graph_module: fx.GraphModule) -> WithoutFloats:
        """See the class; the graph is changed in place."""
        graph = graph_module.graph
        by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
        tensors = {by_name[number]: by_name[tensor] for number, tensor in self.tensors.items()}
        floats = _Floats(graph, tensors)
        for node in list(graph.nodes):
            floats.replace(node)
        if not floats.stuck:
            for node in (*reversed(floats.replaced), *tensors):
                graph.erase_node(node)
        return WithoutFloats(graph_module=graph_module, needed=frozenset(node.name for node in floats.stuck))


#: Functions of Python's floats whose operator has another name.
_OTHER_NAMES = {"truediv": "div", "mod": "remainder", "max": "maximum", "min": "minimum"}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MAX_ROUNDING = 1e-14  # between a function of Python and that of torch, relative


class _Floats:
    """Floats of one graph, and the tensors that stand for them."""

    def __init__(self, graph: fx.Graph, tensors: Mapping[fx.Node, fx.Node]) -> None:
        self.stuck: set[fx.Node] = set()
        self.replaced: list[fx.Node] = []
        self._graph = graph
        self._tensors = dict(tensors)
        self._placeholders = {node: {node} for node in tensors}  # that a float comes from
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._mode = fake_mode_of(tensors.values())

    def replace(self, node: fx.Node) -> None:
        """Do without the floats among the arguments of a node."""
        behind = [self._placeholders[item] for item in node.all_input_nodes if item in self._placeholders]
        if not behind:
            return
        is_float = isinstance(node.meta.get("val"), torch.SymFloat)
        with self._graph.inserting_before(node):
            made = self._arithmetic(node) if is_float else self._operator(node)
        if made is None:
            self.stuck.update(*behind)
            return
        if is_float:
            self._tensors[node], self._placeholders[node] = made, set().union(*behind)
        else:
            node.replace_all_uses_with(made)
        self.replaced.append(node)

    def _arithmetic(self, node: fx.Node) -> fx.Node | None:
        name = str(getattr(node.target, "__name__", "")).lstrip("_").removeprefix("sym_")
        packet = getattr(aten, _OTHER_NAMES.get(name, name), None)
        if packet is None or node.kwargs or not all(self._is_plain(item) for item in node.args):
            return None
        hints: list[Any] = [
            item.meta["val"].node.hint if isinstance(item, fx.Node) else item for item in node.args
        ]
        for overload in _overloads(packet, {index: True for index in range(len(node.args))}):
            found = overload(*(torch.tensor(float(hint), dtype=torch.float64) for hint in hints)).item()
            if math.isclose(found, node.meta["val"].node.hint, rel_tol=_MAX_ROUNDING):
                operands = [self._as_tensor(item, torch.float64) for item in node.args]
                return self._made(node, overload, operands, {}, self._example(torch.float64))
        return None

    def _is_plain(self, item: object) -> bool:
        """Whether it is a float of the graph or a constant, not a size."""
        return isinstance(item, (int, float)) or (isinstance(item, fx.Node) and item in self._tensors)

    def _operator(self, node: fx.Node) -> fx.Node | None:
        value, overload = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor) or not isinstance(overload, torch._ops.OpOverload):
            return None
        names = [argument.name for argument in overload._schema.arguments]
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        floats = {name for name, item in given.items() if isinstance(item, fx.Node) and item in self._tensors}
        dtype = self._type_beside(node)
        if dtype is None:
            return None
        if overload is aten.scalar_tensor.default:
            return self._as_tensor(given["s"], value.dtype) if value.dtype.is_floating_point else None
        if floats == {"fill_value"} and value.dtype.is_floating_point:
            number = self._as_tensor(given["fill_value"], value.dtype)
            zeros = self._graph.call_function(overload, (), {**given, "fill_value": 0.0})
            zeros.meta = dict(node.meta)
            return self._made(node, aten.add.Tensor, (zeros, number), {}, value)
        if floats == {"alpha"} and isinstance(given.get("other"), fx.Node):
            factor, other = self._as_tensor(given.pop("alpha"), dtype), given["other"]
            scaled = self._made(node, aten.mul.Tensor, (other, factor), {}, other.meta["val"])
            return scaled and self._made(node, overload, (), {**given, "other": scaled}, value)
        return self._with_tensors(node, given, floats, dtype)

    def _with_tensors(
        self, node: fx.Node, given: Mapping[str, Any], floats: Set[str], dtype: torch.dtype
    ) -> fx.Node | None:
        """The same operator by an overload that takes tensors where this one has floats."""
        overload: Any = node.target
        for found in _overloads(overload.overloadpacket, {name: name in floats for name in given}):
            if torch.Tag.pointwise not in found.tags:
                continue
            takes_tensor = {argument.name: _is_tensor(argument) for argument in found._schema.arguments}
            arguments = {
                name: self._as_tensor(item, dtype) if takes_tensor[name] and self._is_plain(item) else item
                for name, item in given.items()
            }
            made = self._made(node, found, (), arguments, node.meta["val"])
            if made is not None:
                return made
        return None

    def _type_beside(self, node: fx.Node) -> torch.dtype | None:
        """The type that a float has beside the tensors of an operator; None where it is made an integer."""
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            tensors = [item.meta["val"] for item in node.all_input_nodes if item not in self._tensors]
            dtype = torch.float64 if not tensors else torch.result_type(tensors[0], 1.0)
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        return _WIDER.get(dtype, dtype)

    def _as_tensor(self, item: Any, dtype: torch.dtype) -> fx.Node:
        """A float or a constant as a tensor of one element."""
        if not isinstance(item, fx.Node):
            made = self._graph.call_function(aten.full.default, ([], float(item)), {"dtype": dtype})
            made.meta["val"] = self._example(dtype)
            return made
        source = self._tensors[item]
        if source.meta["val"].dtype == dtype:
            return source
        key = (source, dtype)
        if key not in self._casts:
            made = self._graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
            made.meta["val"] = self._example(dtype)
            self._casts[key] = made
        return self._casts[key]

    def _example(self, dtype: torch.dtype) -> torch.Tensor:
        with self._mode:
            return torch.empty((), dtype=dtype)

    def _made(
        self, node: fx.Node, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: torch.Tensor
    ) -> fx.Node | None:
        """A call in a node's place, whose value is like this one; None where it is not."""
        made = self._graph.call_function(overload, tuple(args), dict(kwargs))
        values = fx.map_arg((made.args, made.kwargs), lambda item: item.meta["val"])
        try:
            with self._mode, torch.no_grad(), enable_python_dispatcher():
                found = overload(*values[0], **values[1])
        except Exception:
            found = None  # the overload does not take tensors of these shapes or devices
        if not isinstance(found, torch.Tensor) or not _is_like(found, like):
            self._graph.erase_node(made)
            return None
        made.meta = {**node.meta, "val": like}
        return made


def _is_like(value: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(each.dtype, each.device, each.dim()) for each in (value, other)]
    sizes = zip(value.shape, other.shape, strict=False)
    return kinds[0] == kinds[1] and all(is_surely(own == wanted) for own, wanted in sizes)


def _overloads(packet: Any, takes_tensor: Mapping[Any, bool]) -> Iterator[Any]:
    """Those of an operator that have these arguments, by names or places, tensors where it is true, and need no others."""
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments: dict[Any, Any] = {}
        for place, argument in enumerate(overload._schema.arguments):
            arguments[argument.name if argument.name in takes_tensor else place] = argument
        needed = {key for key, argument in arguments.items() if not argument.has_default_value()}
        fits = takes_tensor.keys() <= arguments.keys() and needed <= takes_tensor.keys()
        if fits and not overload._schema.is_mutable:
            if all(_is_tensor(arguments[key]) for key, wanted in takes_tensor.items() if wanted):
                yield overload


def _is_tensor(argument: Any) -> bool:
    kind = argument.type
    if isinstance(kind, torch.OptionalType):
        kind = kind.getElementType()
    return isinstance(kind, torch.TensorType)
