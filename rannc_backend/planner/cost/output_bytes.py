"""Memory for the outputs with rows that the user gets back.

In: a block graph, the stages of a plan. Out: bytes on a rank of the stage that makes an output, and on every rank;
whether a plan has room for them. A maker holds what it makes of all micro-batches until that is sent; then every rank
holds its own rows, until the user lets go of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import OutputPlan, StagePlan, lane_bytes, lanes_of_stages
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import replica_rows
from rannc_backend.report.words import percent_text, size_text

#: Of the memory that a plan leaves on a rank: what outputs beside a loss may take, with outputs="auto".
OUTPUT_SHARE = 0.5
#: Why outputs are left out with outputs="loss".
ASKED = "option outputs is 'loss'"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBytes:
    """Bytes of the outputs of a graph, in steps of so many rows on so many devices."""

    graph: BlockGraph
    batch_rows: int
    num_devices: int

    def by_block(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """[blocks, rows]: what a block makes for so many rows."""
        found = np.zeros((len(self.graph.blocks), len(rows)))
        for output, sizes in zip(self.graph.outputs, self._bytes(rows), strict=True):
            found[output.block] += sizes
        return found

    def of_stage(self, blocks: Collection[int], num_micro_batches: int, replicas: int) -> float:
        """On each rank of a stage with these blocks: what it makes in a step, and its own rows of all outputs."""
        made = [output.block in blocks for output in self.graph.outputs]
        rows = replica_rows(self.batch_rows, num_micro_batches, replicas)
        sizes = self._bytes([rows])[:, 0]
        return float(num_micro_batches * sizes[made].sum()) + self.of_any(num_micro_batches)

    def of_any(self, num_micro_batches: int) -> float:
        """A rank's own rows; nothing where what one device makes is what comes back."""
        if self.num_devices == 1 and num_micro_batches == 1:
            return 0.0
        return float(self._bytes([math.ceil(self.batch_rows / self.num_devices)]).sum())

    def whole(self) -> tuple[int, ...]:
        """By output, of all rows of a step."""
        return tuple(math.ceil(size) for size in self._bytes([self.batch_rows])[:, 0])

    def _bytes(self, rows: Sequence[int]) -> NDArray[np.float64]:
        return evaluate([output.num_bytes for output in self.graph.outputs], rows)


def why_left_out(stages: Sequence[StagePlan], needed: Sequence[float], limit_bytes: float) -> str:
    """Why outputs that need so many bytes on each rank of each stage are not delivered; "" if they are."""
    worst, reason = 0.0, ""
    for lane in lanes_of_stages(stages):
        own = [stages[index].predicted for index in lane]
        left = limit_bytes - lane_bytes((cost.peak_bytes, cost.workspace_bytes) for cost in own)
        num_bytes = sum(needed[index] for index in lane)
        missing = num_bytes - OUTPUT_SHARE * left
        if missing > worst:
            worst = missing
            reason = (
                f"they need {size_text(num_bytes)} on each rank of {lane_text(lane)}, where the plan leaves "
                f"{size_text(left)}, of which they may take {percent_text(OUTPUT_SHARE)}"
            )
    return reason


def needed_by_stage(
    outputs: OutputBytes, stages: Sequence[StagePlan], num_micro_batches: int
) -> tuple[float, ...]:
    """Bytes on each rank of each stage."""
    return tuple(outputs.of_stage(stage.blocks, num_micro_batches, stage.num_replicas) for stage in stages)


def with_outputs(stages: Sequence[StagePlan], needed: Sequence[float]) -> tuple[StagePlan, ...]:
    """The stages, with so many bytes more in their buffers."""
    return tuple(
        stage.model_copy(
            update={
                "predicted": stage.predicted.model_copy(
                    update={
                        name: getattr(stage.predicted, name) + math.ceil(num_bytes)
                        for name in ("buffer_bytes", "peak_bytes")
                    }
                )
            }
        )
        for stage, num_bytes in zip(stages, needed, strict=True)
    )


def output_plans(outputs: OutputBytes, stages: Sequence[StagePlan]) -> tuple[OutputPlan, ...]:
    """The outputs for a plan."""
    stage_of = {block: stage.index for stage in stages for block in stage.blocks}
    return tuple(
        OutputPlan(name=output.name, module=output.module, stage=stage_of[output.block], num_bytes=num_bytes)
        for output, num_bytes in zip(outputs.graph.outputs, outputs.whole(), strict=True)
    )
