"""Memory of whole stages, from their graphs, against stages that really run; and what the planner does with
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.blocks import traced_stages
from rannc_backend.planner.blocks.block_partitions import partition_blocks
from rannc_backend.planner.blocks.partitions import partitions_of
from rannc_backend.planner.blocks.traced_stages import TracedStages
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import BUDGETS, AnalyticPricer, Interval, StageMemory
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.options import Config
from tests.choice import mostly
from tests.unit.rannc_backend.planner.blocks.block_peaks import (
    CLUSTER,
    SCALARS_BYTES,
    analysed,
    measured_peak,
)

ROWS = 16


def tracer(name: str) -> TracedStages:
    analysis, graph = analysed(name)
    return TracedStages(
        analysis=analysis, graph=graph, compiler="eager", segments=Segments(graph, fused=False)
    )


def peak_of(memory: StageMemory | None, rows: int) -> float:
    assert memory is not None
    return float(
        evaluate([memory.saved_bytes], [rows])[0, 0] + evaluate(memory.workspace_bytes, [rows]).max()
    )


# Thirds of two or four layers begin and end inside of them.
CASES = [
    (name, parts, budget)
    for name in ("gpt2", "llama", "chain", "filters")
    for parts in (1, 2, 3)
    for budget in (*BUDGETS, SEGMENTS_BUDGET)
]


@pytest.mark.parametrize(
    ("name", "parts", "budget"),
    mostly(
        CASES,
        [
            ("gpt2", 3, 1.0),
            ("chain", 2, 0.5),
            ("filters", 3, 1.0),
            ("llama", 1, SEGMENTS_BUDGET),
            ("llama", 3, SEGMENTS_BUDGET),
        ],
    ),
)
def test_memory_of_a_stage_is_what_it_takes(name: str, parts: int, budget: float) -> None:
    num_blocks = len(analysed(name)[1].blocks)
    for part in range(parts):
        begin, end = num_blocks * part // parts, num_blocks * (part + 1) // parts
        (memory,) = tracer(name).memory([Interval(begin=begin, end=end, budget=budget, rows=ROWS)])
        peak, most, least = (
            peak_of(memory, ROWS),
            measured_peak(name, begin, end, ROWS, budget, as_trained=True),
            measured_peak(name, begin, end, ROWS, budget, as_trained=True, lets_go=True),
        )
        assert least - SCALARS_BYTES <= peak <= 1.02 * most, (
            f"blocks {begin} to {end}: {peak / least}, {peak / most}"
        )


@pytest.mark.parametrize("budget", [1.0, 0.5, SEGMENTS_BUDGET])
@pytest.mark.parametrize("name", ["gpt2", "llama", "chain"])
def test_a_first_stage_keeps_all_that_it_saved_for_the_second_part(name: str, budget: float) -> None:
    """By its blocks as by its graph: the first part of its backward computes nothing."""
    analysis, graph = analysed(name)
    end = len(graph.blocks) // 3
    (traced,) = tracer(name).memory([Interval(begin=0, end=end, budget=budget, rows=ROWS)])
    assert traced is not None
    pricer = AnalyticPricer(
        device=CLUSTER.device,
        partitions=partition_blocks(analysis, graph, compiler="eager", rows=ROWS),
    )
    costs = IntervalCosts(
        graph=graph,
        cluster=CLUSTER,
        batch_rows=ROWS,
        micro_batches=(1,),
        pricer=pricer,
        optimizer_factor=2.0,
    )
    prices = costs.prices(0, end, budget, [ROWS])
    kept, saved = evaluate([traced.kept_bytes, traced.saved_bytes], [ROWS])[:, 0]
    assert kept > saved
    assert prices.kept_bytes[0] - prices.saved_bytes[0] == pytest.approx(kept - saved, rel=0.01)


def test_equal_stages_are_traced_once_and_many_operators_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []

    def traced(stage: Any, **options: Any) -> Any:
        traces.append(stage.index)
        return partitions_of(stage, **options)

    monkeypatch.setattr(traced_stages, "partitions_of", traced)
    blocks, stages = analysed("chain")[1].blocks, tracer("chain")
    names = ["", *(block.structure for block in blocks), ""]
    inner = [place for place in range(len(blocks)) if names[place : place + 3] == names[2:5]]
    found = stages.memory([Interval(begin=place, end=place + 1, budget=1.0, rows=ROWS) for place in inner])
    assert len(inner) > 1 and len(traces) == 1 and len(set(map(id, found))) == 1
    stages.most_nodes = 3
    assert (
        stages.memory([Interval(begin=0, end=len(blocks), budget=1.0, rows=ROWS)]) == [None]
        and len(traces) == 1
    )


class Larger:
    """Stages that need more than their blocks say."""

    def __init__(self, added_bytes: float) -> None:
        self.added_bytes, self.asked = added_bytes, 0

    def memory(self, stages: Sequence[Interval]) -> list[StageMemory | None]:
        self.asked += 1
        known = tracer("chain").memory(stages)
        return [
            item
            and replace(item, workspace_bytes=tuple(size + self.added_bytes for size in item.workspace_bytes))
            for item in known
        ]


def plan_with(added_bytes: float, limit_bytes: float | None = None, **options: Any) -> tuple[Plan, int]:
    analysis, graph = analysed("chain")
    options |= {} if limit_bytes is None else {"mem_limit_gb": limit_bytes / BYTES_PER_GB}
    pricer = AnalyticPricer(
        device=CLUSTER.device, partitions=partition_blocks(analysis, graph, compiler="eager", rows=8)
    )
    larger = Larger(added_bytes)
    plan = plan_blocks(
        graph,
        Config(mem_margin=0.0, pipeline_num=1, **options),
        cluster=CLUSTER,
        batch_rows=256,
        schedules=("1f1b", "fill_drain"),
        fingerprint="chain",
        pricer=pricer,
        whole_stages=larger,
    )
    return plan, larger.asked


def test_a_plan_says_what_whole_stages_need_and_keeps_to_the_limit() -> None:
    free, asked = plan_with(0.0, stage_memory="traced")
    more, _ = plan_with(1e6, stage_memory="traced")
    assert asked == 1
    assert plan_with(0.0)[1] == 0, "far from the limit nothing is traced"
    assert [stage.predicted.workspace_bytes for stage in more.stages] != [
        stage.predicted.workspace_bytes for stage in free.stages
    ]
    fullest = max(stage.predicted.peak_bytes for stage in free.stages)
    # As blocks are added up, the plan without a limit fits; as stages are, it does not.
    tight, asked = plan_with(0.1 * fullest, 1.05 * fullest)
    assert asked > 1
    assert max(stage.predicted.peak_bytes for stage in tight.stages) <= 1.05 * fullest
    assert tight.predicted_step_seconds >= free.predicted_step_seconds
    assert tight.memory_limit_bytes == pytest.approx(1.05 * fullest, abs=1.0)


def test_where_no_plan_fits_as_a_whole_the_error_says_what_would() -> None:
    with pytest.raises(InfeasiblePlanError) as raised:
        plan_with(1e12, 1e9, stage_memory="traced")
    smallest = raised.value.smallest_bytes
    assert smallest is not None and smallest > 1e12
    plan, _ = plan_with(1e12, smallest * 1.001, stage_memory="traced")
    assert plan.num_stages >= 1
