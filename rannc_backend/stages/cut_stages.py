"""An analysed graph cut into stages along a plan, and what travels between them.

In: an `AnalyzedGraph`, a plan projected on it. Out: a graph per stage and the edges between stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rannc_backend.capture.analysis import GraphAnalysis, mixed_batch_error
from rannc_backend.ir.action import INPUT, OUTPUT
from rannc_backend.ir.exchange import Edge
from rannc_backend.ir.graph_input import BufferInput, GraphInput
from rannc_backend.passes.batch.batch_split import RowsOutput
from rannc_backend.passes.pipeline import PassError
from rannc_backend.passes.stage.recompute import Recomputed, mark_segments
from rannc_backend.passes.stage.split_stages import BoundaryOutput, StageGraph, split_stages
from rannc_backend.schedule.edges import EdgeSpec


@dataclass(frozen=True, slots=True)
class OutputsLeftOut:
    """Why row outputs stay where they are made, in steps that have a backward or ``always``; "" if they do not."""

    why: str = ""
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A graph cut in stages: their graphs and the edges between endpoints, at the lengths of the capture."""

    graphs: tuple[StageGraph, ...]
    edges: dict[tuple[int, int], Edge]
    training_edges: dict[tuple[int, int], Edge]
    left_out: OutputsLeftOut

    def edges_in(self, *, training: bool) -> dict[tuple[int, int], Edge]:
        """Of a step that has a backward, or of one that has none."""
        return self.training_edges if training else self.edges

    @property
    def buffer_makers(self) -> dict[str, int]:
        """The stage that makes the new value of each buffer that the graph changes."""
        return {fqn: graph.index for graph in self.graphs for fqn in graph.updated_buffers}

    def buffer_readers(self, inputs: Sequence[GraphInput]) -> dict[str, frozenset[int]]:
        """The stages that read each buffer of the model; ``inputs``: those of the graph that was cut."""
        names = {item.name: item.fqn for item in inputs if isinstance(item, BufferInput)}
        readers: dict[str, set[int]] = {}
        for graph in self.graphs:
            for slot in graph.inputs:
                if slot.name in names:
                    readers.setdefault(names[slot.name], set()).add(graph.index)
        return {name: frozenset(stages) for name, stages in readers.items()}


def cut_stages(
    analysis: GraphAnalysis,
    stage_of: Mapping[str, int],
    num_stages: int,
    left_out: OutputsLeftOut,
    recomputed: Recomputed,
) -> StageCut:
    """Cut the row-wise graph. ``recomputed``: what stages compute again that do so by segments."""
    split = analysis.split
    try:
        graphs = split_stages(
            split.rowwise,
            split.outputs,
            split.layouts,
            stage_of,
            num_stages,
            input_kinds=analysis.input_kinds,
            rows_symbol=analysis.captured.rows_symbol,
        )
    except PassError as error:
        raise mixed_batch_error(error) from error
    for graph in graphs:
        mark_segments(graph.graph_module, recomputed)
    edges = edges_of(analysis, graphs, all_outputs=not left_out.always)
    training_edges = edges_of(analysis, graphs, all_outputs=False) if left_out.why else edges
    return StageCut(graphs=graphs, edges=edges, training_edges=training_edges, left_out=left_out)


def edges_of(
    analysis: GraphAnalysis,
    graphs: tuple[StageGraph, ...],
    *,
    all_outputs: bool,
    lengths: tuple[int, ...] | None = None,
) -> dict[tuple[int, int], Edge]:
    """The edges between endpoints, at these lengths (those of the capture if not given)."""
    producer = {
        slot.name: graph.index
        for graph in graphs
        for slot in graph.outputs
        if isinstance(slot, BoundaryOutput)
    }
    carried: dict[tuple[int, int], list[str]] = {}
    for graph in graphs:
        for slot in graph.inputs:
            if slot.kind == "batch":
                carried.setdefault((INPUT, graph.index), []).append(slot.name)
            elif slot.kind == "boundary":
                carried.setdefault((producer[slot.name], graph.index), []).append(slot.name)
        for output in graph.outputs:
            if isinstance(output, RowsOutput) and all_outputs:
                names = carried.setdefault((graph.index, OUTPUT), [])
                if output.name not in names:
                    names.append(output.name)
    edges: dict[tuple[int, int], Edge] = {}
    for (src, dst), names in carried.items():
        values = tuple(analysis.value(name, lengths) for name in names)
        gradient = tuple(value for value in values if value.name in analysis.needs_grad)
        edges[src, dst] = Edge(src=src, dst=dst, forward=values, gradient=gradient)
    return edges


def edge_specs(edges: Mapping[tuple[int, int], Edge]) -> tuple[EdgeSpec, ...]:
    """The schedule's view of the edges."""
    return tuple(
        EdgeSpec(
            src=edge.src,
            dst=edge.dst,
            num_forward_values=len(edge.forward),
            num_gradient_values=len(edge.gradient),
            forward_bytes_per_row=sum(value.bytes_per_row for value in edge.forward),
            gradient_bytes_per_row=sum(value.bytes_per_row for value in edge.gradient),
        )
        for edge in edges.values()
    )


def backward_order(graph: StageGraph) -> list[str]:
    """Names of the stage's parameters in the order in which backward finishes them: last used first."""
    first_use: dict[str, int] = {}
    placeholders = [node for node in graph.graph_module.graph.nodes if node.op == "placeholder"]
    position = {node: place for place, node in enumerate(graph.graph_module.graph.nodes)}
    for node, slot in zip(placeholders, graph.inputs, strict=False):
        if slot.kind == "parameter":
            first_use[slot.name] = min((position[user] for user in node.users), default=0)
    return sorted(first_use, key=lambda name: -first_use[name])
