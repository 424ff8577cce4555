"""What chosen stages keep and need, from their own graphs: more exact than the sum over their blocks, which
know less.

In: an analysed graph, its blocks, runs of blocks. Out: `StageMemory` of each (planner/cost/pricing.py).
Nothing is computed.

Why it differs: where a cut lies inside of a layer, the block behind it saves its inputs, and a stage that
holds both sides computes some of them again from what it saves anyway. A trace takes about as long as capture
did for the same operators, so it is made of the few stages of a plan, not of all runs of blocks that the
search looks at, and only where it matters: where a stage comes near to the limit of the memory, in small
models, since in large ones a block is a layer or several; or where the option stage_memory asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import UnsupportedModelError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.passes.stage.recompute import NOTHING_RECOMPUTED, Recomputed, mark_segments
from rannc_backend.planner.blocks.block_partitions import graph_costs, stage_needs_grad
from rannc_backend.planner.blocks.measure import interval_stage
from rannc_backend.planner.blocks.partitions import partitions_of
from rannc_backend.planner.cost.pricing import Interval, StageMemory
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.stages.compiled_stage import minds_rows

logger = logging.getLogger(__name__)

MAX_NODES = 400
"""Operators of all distinct stages up to which they are traced where nobody asks for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class TracedStages:
    """See `WholeStages`. Equal stages are traced once.

    `told`: what the user wants computed again, in place of segments.
    `most_nodes`: no stage is traced where all distinct ones have more operators. `least_elements`: as of `graph_costs`.
    """

    analysis: GraphAnalysis
    graph: BlockGraph
    compiler: str
    segments: Segments
    told: Recomputed = NOTHING_RECOMPUTED
    most_nodes: float = MAX_NODES
    least_elements: int = 0
    _known: dict[object, StageMemory | None] = field(init=False, default_factory=dict)

    def memory(self, stages: Sequence[Interval]) -> list[StageMemory | None]:
        """See `WholeStages`."""
        keys = [self._key(stage) for stage in stages]
        distinct = dict(zip(keys, stages, strict=True))
        num_nodes = sum(
            len(block.nodes)
            for stage in distinct.values()
            for block in self.graph.blocks[stage.begin : stage.end]
        )
        if num_nodes > self.most_nodes:
            return [None] * len(stages)
        for key, stage in distinct.items():
            if key not in self._known:
                self._known[key] = self._trace(stage)
        return [self._known[key] for key in keys]

    def _key(self, stage: Interval) -> object:
        """Equal for stages of equal blocks between equal neighbours, which decide what a stage hands on."""
        names = ["", *(block.structure for block in self.graph.blocks), ""]
        inside = self.segments.of_block[stage.begin : stage.end] if stage.budget == SEGMENTS_BUDGET else ()
        # What the user names is part of the structure of a block.
        numbers = tuple(number - inside[0] for number in inside if not self.told.segment_of)
        return self._rows_hint(stage), stage.budget, numbers, tuple(names[stage.begin : stage.end + 2])

    def _recomputed(self) -> Recomputed:
        return self.told if self.told.segment_of else Recomputed(segment_of=self.segments.of_node)

    def _rows_hint(self, stage: Interval) -> int:
        """As the stage will be compiled."""
        return stage.rows if minds_rows(self.compiler, stage.budget) else self.analysis.captured.rows_hint

    def _trace(self, stage: Interval) -> StageMemory | None:
        analysis = self.analysis
        graph = interval_stage(analysis, [block.nodes for block in self.graph.blocks], stage.begin, stage.end)
        if stage.budget == SEGMENTS_BUDGET:
            mark_segments(graph.graph_module, self._recomputed())
        try:
            (partition,) = partitions_of(
                graph,
                needs_grad=stage_needs_grad(analysis, graph),
                requires_grad_parameters=frozenset(analysis.trained_parameters),
                rows_symbol=analysis.captured.rows_symbol,
                compiler=self.compiler,
                budgets=(stage.budget,),
                rows_hint=self._rows_hint(stage),
                wide_sums=self.graph.wide_sums,
            )
        except UnsupportedModelError as error:
            logger.info(
                "blocks %d to %d cannot be traced as one stage: %s", stage.begin, stage.end - 1, error
            )
            return None
        # The executor holds the message that brought the gradients of outputs.
        costs = graph_costs(
            partition,
            analysis.captured.rows_symbol,
            holds_tangents=True,
            least_elements=self.least_elements,
        )
        # What is saved of the inputs was received, and is counted with the message.
        kept = sum((costs.output_bytes[place] for place in costs.saved_outputs), sympy.Integer(0))
        return StageMemory(
            saved_bytes=sympy.expand(costs.inner_bytes + kept),
            workspace_bytes=(*costs.forward_workspace, *costs.backward_workspace),
            kept_bytes=costs.kept_bytes,
        )
