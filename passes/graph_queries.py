"""Read-only questions about a graph that several passes ask.

In: an `fx.Graph`, its nodes, or a size. Out: nodes, an expression. Nothing here changes a graph. Term: a node lies *behind* another
when the other's value is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

aten = torch.ops.aten

_UNSET_MEMORY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs in order."""
    return list(graph.find_nodes(op="placeholder"))


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """The flat tuple that a captured graph gives back: nodes, None or numbers."""
    values = graph.output_node().args[0]
    assert isinstance(values, (tuple, list)), "the output of a captured graph is one flat tuple"
    return tuple(values)


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, for whoever knows the operator: its schema says what they are, the type that
    fx gives all arguments does not.
    """
    return node.args


def overload_of(node: fx.Node) -> OpOverload:
    """The operator that a node calls, with its schema."""
    assert isinstance(node.target, OpOverload), f"{node} calls no operator of torch's dispatcher"
    return node.target


def is_zeros(node: Any) -> bool:
    """Whether a value is a new tensor of zeros."""
    if not isinstance(node, fx.Node):
        return False
    if node.target in (aten.new_zeros.default, aten.zeros.default):
        return True
    return node.target in (aten.full.default, aten.new_full.default) and bool(arguments_of(node)[-1] == 0)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers (dropout and fused attention with probability 0 included)."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def gives_equal_values(node: fx.Node) -> bool:
    """Whether two such calls with equal arguments give equal values: torch's own operators that draw no random
    numbers, change nothing and set all memory that they make, and Python's on sizes and tuples.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return node.op == "call_function" and getattr(target, "__module__", "") in ("_operator", "math")
    space, _, name = target._schema.name.partition("::")
    is_plain = space in ("aten", "prims") and not target._schema.is_mutable and name not in _UNSET_MEMORY
    return is_plain and not is_random(node)


def argument_key(value: Any, of_node: Callable[[fx.Node], object] = lambda node: node) -> object:
    """Equal for equal arguments alone: 1, 1.0 and True are three, and so are 0.0 and -0.0. What cannot be compared is
    equal to nothing.
    """
    if isinstance(value, fx.Node):
        return of_node(value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(argument_key(item, of_node) for item in value))
    if isinstance(value, dict):
        return tuple((name, argument_key(item, of_node)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", *(argument_key(item, of_node) for item in (value.start, value.stop, value.step)))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    kinds = (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return (type(value), value) if value is None or isinstance(value, kinds) else object()


def num_elements(value: Tensor) -> sympy.Expr:
    """How many elements a tensor has, as an expression in its sizes."""
    return sympy.Mul(*map(size_expression, value.shape))


def fake_mode_of(nodes: Iterable[fx.Node]) -> Any:
    """The mode that the first tensor among the nodes' values, all of them fake, belongs to."""
    values = (node.meta["val"] for node in nodes)
    tensor: Any = next(value for value in values if isinstance(value, Tensor))
    return tensor.fake_mode


def nodes_behind(
    nodes: Iterable[fx.Node], *, stop: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """The given nodes and all that lie behind them; nothing that lies only behind nodes of which `stop` is
    true.
    """
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                pending.extend(node.all_input_nodes)
    return found


def nearest_node(node: fx.Node, wanted: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The wanted node that belongs closest to `node`: the first of the same module of the user's, else the
    one with the fewest edges between them, in either direction; None where no path leads to one."""
    path = node.meta.get("module_path", "")
    if path and node.op != "placeholder":
        for other in node.graph.nodes:
            if other.meta.get("module_path", "") == path and wanted(other):
                return other
    seen, pending = {node}, [node]
    for current in pending:
        for neighbour in [*current.all_input_nodes, *current.users]:
            if wanted(neighbour):
                return neighbour
            if neighbour not in seen and neighbour.op != "output":
                seen.add(neighbour)
                pending.append(neighbour)
    return None


def symbols_in(value: Any) -> set[sympy.Symbol]:
    """The symbols of a size, or of the sizes of a tensor or of several."""
    if isinstance(value, (tuple, list)):
        return {symbol for item in value for symbol in symbols_in(item)}
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    symbolic = (size.node.expr for size in sizes if isinstance(size, kinds))
    return {symbol for expression in symbolic for symbol in expression.free_symbols}


def is_one(size: Any) -> bool:
    """Whether a size is the number 1, and no symbol."""
    return isinstance(size, int) and size == 1


def size_expression(size: Any) -> sympy.Expr:
    """A size (int or SymInt) as a sympy expression."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else sympy.sympify(size)
