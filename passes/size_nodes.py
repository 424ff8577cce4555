"""Sizes as nodes of a graph.

In: an expression over the batch size and the lengths, and the nodes that hold those. Out: a node that computes
it. Terms: a *length* is a size other than the batch size that differs between calls; a graph has a placeholder
with a number for each of its lengths.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from rannc_backend.passes.graph_queries import placeholders, size_expression, symbols_in

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
    return sympy.lambdify(symbols, expression, modules=[_OPERATORS])(*numbers)


def plain_at(size: Size, known: Mapping[sympy.Symbol, sympy.Expr]) -> Size:
    """A size with these expressions in place of symbols."""
    return size if isinstance(size, int) else plain(size.xreplace(known))


def size_node(
    graph: fx.Graph, expression: Any, known: Mapping[sympy.Symbol, fx.Node]
) -> fx.Node | int | None:
    """The expression's value from the nodes of its symbols, made where the graph inserts; None where an operator
    of it is not known, or a symbol.
    """
    value = size_expression(expression)
    if value.is_Integer:
        return int(value)
    if value in known:
        return known[value]
    if value.is_Pow and value.exp.is_Integer and value.exp > 0:
        parts, function = [value.base] * int(value.exp), operator.mul
    elif type(value).__name__ in _OPERATORS:
        parts, function = list(value.args), _OPERATORS[type(value).__name__]
    else:
        return None
    operands = [size_node(graph, part, known) for part in parts]
    if any(operand is None for operand in operands):
        return None
    return functools.reduce(functools.partial(_applied, graph, function), operands)


def _applied(graph: fx.Graph, function: Callable[[Any, Any], Any], left: Any, right: Any) -> fx.Node:
    made = graph.call_function(function, (left, right))
    made.meta["val"] = function(
        *(item.meta["val"] if isinstance(item, fx.Node) else item for item in (left, right))
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
