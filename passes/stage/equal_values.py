"""Compute once what forward and backward compute twice: common subexpressions of a joint graph.

In: a functional graph with fake values. Out: the same graph, changed in place: a call with the operator and the
arguments of an earlier one is that one's value.

Proof sketch. Operators of torch's own namespaces that draw no random numbers and change none of their operands give
equal values for equal arguments; by induction along the graph, a call whose arguments have been replaced by equal
ones gives an equal value. Two outputs stay two tensors: what shares memory with an output is left alone, as a
caller may keep one of them and hand on the other. Calls of anything else (libraries' operators, functions that run
as written) are left alone.

Torch does the same before it cuts a joint graph (`fx_graph_cse`), by way of a module that imports all of Inductor:
a second of every rank's first call, for stages whose operators run one by one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from rannc_backend.passes.graph_queries import output_values
from rannc_backend.passes.pipeline import GraphPass

_NAMESPACES = frozenset({"aten", "prims"})
_UNSET_MEMORY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


class _Unknown(Exception):
    """An argument that cannot be compared."""


@dataclass(frozen=True, slots=True)
class ShareEqualValues(GraphPass):
    """The pass of `share_equal_values`."""

    name: ClassVar[str] = "equal_values"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"values_shared"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        share_equal_values(graph_module.graph)
        return graph_module


def share_equal_values(graph: fx.Graph) -> int:
    """Change the graph in place; gives how many calls are left out. The caller recompiles."""
    kept_apart = {memory for node in _nodes_of(output_values(graph)) if (memory := _memory(node)) is not None}
    known: dict[object, fx.Node] = {}
    num_shared = 0
    for node in list(graph.nodes):
        if not _gives_equal_values(node) or _memory(node) in kept_apart:
            continue
        try:
            key = (node.target, _key(node.args), _key(node.kwargs))
        except _Unknown:
            continue
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            num_shared += 1
    return num_shared


def _nodes_of(values: Any) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _gives_equal_values(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return (
            target.namespace in _NAMESPACES
            and torch.Tag.nondeterministic_seeded not in target.tags
            and not target._schema.is_mutable
            and target._schema.name.partition("::")[2] not in _UNSET_MEMORY
        )
    # Sizes, and elements of what has several values.
    return getattr(target, "__module__", "") in ("_operator", "math") or target is operator.getitem


def _key(value: Any) -> object:
    """Equal for equal arguments alone: 1, 1.0 and True are three, and so are 0.0 and -0.0."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    if value is None or isinstance(
        value, (fx.Node, bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return (type(value), value)
    raise _Unknown
