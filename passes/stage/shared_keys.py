"""Keep the keys of random numbers in memory, where a compiler would compute them again for every element.

In: a graph after `randomness`, about to be compiled for a CPU. Out: the same graph, changed in place: vectors
that are made of numbers alone (``arange``, the seed, the first row) and then broadcast are read from memory.
Their values are the same.

Why: a compiler fuses what reads no memory into each of its consumers. The key of an element is 20 operations;
fused into every dropout they are computed once per row in place of once, and their C++ is written and
compiled once per consumer. On a GPU operations cost less than memory, so that nothing is changed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from rannc_backend.passes.pipeline import GraphPass

_FEWEST_OPERATORS = 5  # below, reading memory is not faster


@dataclass(frozen=True, slots=True)
class KeepSharedKeys(GraphPass):
    """The pass of `keep_shared_keys`."""

    name: ClassVar[str] = "shared_keys"
    requires: ClassVar[frozenset[str]] = frozenset({"traced"})
    provides: ClassVar[frozenset[str]] = frozenset({"keys_in_memory"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        keep_shared_keys(graph_module)
        return graph_module


def keep_shared_keys(graph_module: fx.GraphModule) -> int:
    """Change the graph in place; gives how many vectors are kept. The caller recompiles."""
    num_operators = _made_of_numbers(graph_module.graph)
    num_kept = 0
    for node, count in num_operators.items():
        value = node.meta["val"]
        if value.ndim != 1 or count < _FEWEST_OPERATORS or value.device.type != "cpu":
            continue
        if broadcasts := [
            user
            for user in node.users
            if isinstance(user.meta.get("val"), Tensor) and user.meta["val"].ndim > 1
        ]:
            kept = _keep(graph_module.graph, node)
            for user in broadcasts:
                user.replace_input_with(node, kept)
            num_kept += 1
    return num_kept


def _made_of_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Tensors that depend on no tensor with dimensions from outside, and how many operators each takes."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        tensors = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), Tensor)]
        if all(item in found or item.meta["val"].ndim == 0 for item in tensors):
            found[node] = 1 + sum(found.get(item, 0) for item in tensors)
    return found


def _keep(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same vector by way of ``as_strided``, which is taken of memory."""
    value, last, size = node.meta["val"], node, node.meta["val"].shape[0]
    if isinstance(size, torch.SymInt):
        with graph.inserting_after(node):
            last = graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
        last.meta["val"] = size
        size = last
    with graph.inserting_after(last):
        kept = graph.call_function(torch.ops.aten.as_strided.default, (node, [size], [1]))
    kept.meta["val"] = value
    return kept
