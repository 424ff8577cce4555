"""Let a graph write some of its outputs into memory that it is given, such as the slices of a message.

In: a graph whose output is one flat tuple, and which outputs. Out: a graph with one more input per such
output, its *destination*, which is written in place of returning the output. Inductor stores a pointwise
value there in the kernel that computes it, so nothing is copied; what a library call makes would be copied by
a kernel of its own, so such outputs are left to whoever packs the message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from rannc_backend.passes.pipeline import GraphPass
from rannc_backend.passes.stage.fused_operators import is_fused


@dataclass(frozen=True, slots=True)
class WriteToDestinations(GraphPass):
    """The pass of `write_to_destinations`; `indices` as there, chosen by `storable` on the same graph. It
    renumbers the outputs, so it comes last of those that go by their numbers.
    """

    name: ClassVar[str] = "send_slices"
    requires: ClassVar[frozenset[str]] = frozenset({"traced", "all_outputs"})
    ends: ClassVar[frozenset[str]] = frozenset({"all_outputs"})
    indices: Sequence[int]

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return write_to_destinations(graph_module, self.indices)


def storable(graph_module: fx.GraphModule, candidates: Collection[int]) -> tuple[int, ...]:
    """Of `candidates` (positions among the outputs), those whose destination is written at no cost,
    ascending.
    """
    results = _results(graph_module)
    return tuple(
        index
        for index in sorted(candidates)
        if isinstance(results[index], fx.Node)
        and is_fused(results[index])
        and isinstance(results[index].meta["val"], Tensor)
        and not results[index].meta["val"].is_complex()
    )


def write_to_destinations(graph_module: fx.GraphModule, indices: Sequence[int]) -> fx.GraphModule:
    """The graph, writing the outputs at `indices` to new inputs at the end (contiguous, in this order) and
    returning the rest.
    """
    if not indices:
        return graph_module
    graph = fx.Graph()
    results = list(graph.graph_copy(graph_module.graph, {}))  # type: ignore[arg-type]
    last = graph.find_nodes(op="placeholder")[-1]
    for index in indices:
        value = results[index].meta["val"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"destination_{index}")
        last.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
        with graph.inserting_after(results[index]):
            written = graph.call_function(torch.ops.aten.copy_.default, (last, results[index]))
        written.meta["val"] = last.meta["val"]
    graph.output(tuple(result for index, result in enumerate(results) if index not in set(indices)))
    return fx.GraphModule(graph_module, graph)


def _results(graph_module: fx.GraphModule) -> Sequence[fx.Node]:
    return graph_module.graph.output_node().args[0]  # type: ignore[return-value]
