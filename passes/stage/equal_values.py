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

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from rannc_backend.passes.graph_queries import argument_key, gives_equal_values, output_values
from rannc_backend.passes.pipeline import GraphPass
from rannc_backend.passes.stage.liveness import storages


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
    kept_apart = {
        memory for node in output_values(graph) if isinstance(node, fx.Node) for memory in storages(node)
    }
    known: dict[object, fx.Node] = {}
    num_shared = 0
    for node in list(graph.nodes):
        if not gives_equal_values(node) or storages(node).keys() & kept_apart:
            continue
        first = known.setdefault((node.target, argument_key(node.args), argument_key(node.kwargs)), node)
        if first is not node:
            first.meta.update({"kept": True} if node.meta.get("kept") else {})
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            num_shared += 1
    return num_shared
