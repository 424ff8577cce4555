"""Which nodes and which blocks are the same but for their names: equal layers are told apart from unequal
ones.

In: nodes of a row-wise graph. Out: a small integer per node, equal for nodes of one *kind*, and a hash per
block. Terms. The *kind* of a node: its operator, its constants, shapes, dtypes and memory order of what it
reads and makes, and which of them get a gradient. The *structure* of a block: the kinds of its nodes and of
the cloned nodes that they use, how they are wired, what is read from outside and what is read outside. Names,
devices, the batch size's symbol and the keys of random operators do not count; so the structure is the same
in another process, and for the same model on another device.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from rannc_backend.planner.blocks.staged_nodes import StagedGraph
from rannc_backend.planner.cost.compute import before_expand

# The second operand is the key of a random operator, another one for each.
_KEYED = frozenset({torch.ops.aten.bitwise_xor.Scalar})


class Kinds:
    """Kinds of nodes, numbered as they are met. `texts[kind]` says the same in words that do not depend on
    that order.
    """

    def __init__(self, needs_grad: Collection[str]) -> None:
        self.needs_grad = needs_grad
        self.texts: list[str] = []
        self._number: dict[Any, int] = {}
        self._of: dict[fx.Node, int] = {}
        self._value_number: dict[Any, int] = {}
        self._value_texts: list[str] = []
        self._values: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        """The kind of a call_function node."""
        if node not in self._of:
            place = {argument: index for index, argument in enumerate(node.all_input_nodes)}
            args = self._arguments(node.args[:1] if node.target in _KEYED else node.args, place)
            key = (
                node.target,
                args,
                self._arguments(node.kwargs, place),
                self.value(node),
                self._gradients(node),
            )
            if key not in self._number:
                self._number[key] = len(self._number)
                self.texts.append(self._text(key))
            self._of[node] = self._number[key]
        return self._of[node]

    def value(self, node: fx.Node) -> int:
        """A number for shape, strides and dtype of the node's value, and whether it gets a gradient."""
        if node not in self._values:
            key = (_value_key(node.meta.get("val")), node.name in self.needs_grad)
            if key not in self._value_number:
                self._value_number[key] = len(self._value_number)
                self._value_texts.append(repr(_anonymous(key)))
            self._values[node] = self._value_number[key]
        return self._values[node]

    def value_text(self, node: fx.Node) -> str:
        return self._value_texts[self.value(node)]

    def _gradients(self, node: fx.Node) -> tuple[bool, ...]:
        """For each getitem that takes from the node whether it gets a gradient."""
        return tuple(user.name in self.needs_grad for user in node.users if user.target is operator.getitem)

    def _arguments(self, arguments: object, place: Mapping[fx.Node, int]) -> Any:
        if isinstance(arguments, fx.Node):
            return ("node", self.value(arguments), self.value(before_expand(arguments)), place[arguments])
        if isinstance(arguments, Mapping):
            return tuple(
                (str(name), self._arguments(item, place)) for name, item in sorted(arguments.items())
            )
        if isinstance(arguments, list | tuple):
            return ("list", *(self._arguments(item, place) for item in arguments))
        if isinstance(arguments, torch.device):
            return "device"
        # 1, 1.0 and True are equal as keys.
        return (
            type(arguments).__name__,
            arguments if isinstance(arguments, int | float | str) else repr(arguments),
        )

    def _text(self, key: tuple[Any, ...]) -> str:
        target, args, kwargs, value, gradients = key
        return repr(
            (str(target), self._named(args), self._named(kwargs), self._value_texts[value], gradients)
        )

    def _named(self, arguments: Any) -> Any:
        if isinstance(arguments, tuple):
            if arguments and arguments[0] == "node":
                return (
                    "node",
                    self._value_texts[arguments[1]],
                    self._value_texts[arguments[2]],
                    arguments[3],
                )
            return tuple(self._named(item) for item in arguments)
        return arguments


def block_structure(
    staged: StagedGraph,
    kinds: Kinds,
    nodes: Sequence[fx.Node],
    *,
    input_kind: Mapping[str, str],
    is_kept: Callable[[fx.Node], bool],
    numbers: Iterable[object],
) -> str:
    """Hash of a block.

    Args:
        nodes: the block's, in graph order. Cloned nodes that they use are found.
        input_kind: kind of each placeholder ("parameter", ...).
        is_kept: whether a node of the block is read by others or returned.
        numbers: what else must be equal for two blocks to be equal, such as their costs.
    """
    local: dict[fx.Node, str] = {}
    lines = []
    for node in _with_cloned(staged, nodes):
        places = []
        for argument in node.all_input_nodes:
            if argument not in local:
                kind = input_kind.get(argument.name, "prologue") if argument.op == "placeholder" else "value"
                # What comes from outside is numbered by first use.
                local[argument] = f"{len(local)}:{kind}:{kinds.value_text(argument)}"
            places.append(local[argument])
        local[node] = f"{len(local)}"
        lines.append(f"{kinds.texts[kinds.of(node)]} {places} {node in staged.reads and is_kept(node)}")
    lines += [str(_anonymous(number)) for number in numbers]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _with_cloned(staged: StagedGraph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes, each after those of the cloned nodes that it is the first to use."""
    result: dict[fx.Node, None] = {}
    for node in nodes:
        result.update(dict.fromkeys(staged.cloned[node]))
        result[node] = None
    return list(result)


def _value_key(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            tuple(_size_key(size) for size in value.shape),
            tuple(_size_key(size) for size in value.stride()),
            value.dtype,
        )
    if isinstance(value, list | tuple):
        return tuple(_value_key(item) for item in value)
    return _size_key(value) if isinstance(value, int | torch.SymInt) else type(value).__name__


def _size_key(size: object) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _anonymous(item: Any) -> Any:
    """The same with "rows" for the batch size's symbol, whatever its name is in this process."""
    if isinstance(item, tuple):
        return tuple(_anonymous(part) for part in item)
    if isinstance(item, sympy.Expr):
        return str(
            item.xreplace(
                {symbol: sympy.Symbol("rows", positive=True, integer=True) for symbol in item.free_symbols}
            )
        )
    return item
