"""The constants of a stage graph as inputs, so that stages which differ in them alone share their functions.

In: a stage graph and the names of its constants that are tensors. Out: a copy with a placeholder for each,
behind the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from rannc_backend.passes.pipeline import GraphPass


@dataclass(frozen=True, slots=True)
class LiftConstants(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "lift_constants"
    requires: ClassVar[frozenset[str]] = frozenset({"one_stage"})
    provides: ClassVar[frozenset[str]] = frozenset({"constants_lifted"})
    constant_names: tuple[str, ...]

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph_module.graph.find_nodes(op="placeholder"):
            copies[node] = graph.node_copy(node)
        holders = {name: graph.placeholder(f"constant_{i}") for i, name in enumerate(self.constant_names)}
        for node in graph_module.graph.nodes:
            if node.op == "get_attr" and node.target in holders:
                copies[node] = holders[node.target]
            elif node.op == "output":
                graph.output(fx.map_arg(node.args[0], copies.__getitem__))
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return fx.GraphModule(graph_module, graph)
