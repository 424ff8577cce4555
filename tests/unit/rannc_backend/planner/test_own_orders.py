"""Orders that are made for plans: taken where they are faster, priced as they run, within the memory of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.plan_parts import own_order_of, priced, priced_in
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.problem import SearchProblem, Solution
from rannc_backend.planner.search.search import search
from rannc_backend.planner.settling import in_own_order, is_safe, with_own_order
from rannc_backend.report.tables import proof_text
from rannc_backend.schedule.list_run import lower_bound_seconds
from rannc_backend.schedule.list_scheduled import ListScheduled
from rannc_backend.schedule.orders import schedule_named
from rannc_backend.schedule.plan_simulation import schedule_of, simulate_plan
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import split_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

ALL = ("1f1b", "fill_drain", "zb_h1", "list_scheduled")
NUM_BLOCKS, ROWS = 12, 24


def plan_of(
    seed: int, schedules: tuple[str, ...] = ALL, limit_bytes: float = 64 * BYTES_PER_GB, **options: Any
) -> Plan:
    return plan_blocks(
        split_line(seed, NUM_BLOCKS),
        Config(mem_margin=0.0, stage_replicas="1,1,1,1", pipeline_num=6, **options),
        cluster=local_cpu(4, memory_bytes=int(limit_bytes)),
        batch_rows=ROWS,
        schedules=schedules,
        fingerprint="f" * 64,
    )


def found_in(seed: int) -> tuple[SearchProblem, Solution]:
    cluster = local_cpu(4, memory_bytes=64 * BYTES_PER_GB)
    config = Config(stage_replicas="1,1,1,1", pipeline_num=6)
    request = PlanRequest.of(
        split_line(seed, NUM_BLOCKS), config, cluster, AnalyticPricer(device=cluster.device), ROWS, ALL, None
    )
    problem = request.problem(request.costs())
    solution = search(problem).solution
    assert solution is not None
    return problem, solution


@pytest.mark.parametrize("seed", range(6))
def test_all_schedules_are_never_slower_than_fewer(seed: int) -> None:
    seconds = [plan_of(seed, ALL[:count]).predicted_step_seconds for count in (1, 2, 3, 4)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in zip(seconds, seconds[1:]))
    assert seconds[3] < seconds[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_in_its_own_order_is_priced_as_it_runs(seed: int) -> None:
    plan = plan_of(seed, ("list_scheduled",))
    assert plan.schedule == "list_scheduled" and Plan.from_json(plan.to_json()) == plan
    described = schedule_of(plan)
    assert isinstance(described, ListScheduled) and len(described.costs) == 4
    simulated = simulate_plan(plan)
    assert simulated.step_seconds == pytest.approx(plan.predicted_step_seconds, rel=1e-5)
    bound = lower_bound_seconds(described.costs, plan.num_micro_batches)
    assert bound * (1 - 1e-5) <= plan.predicted_step_seconds
    for stage, found in zip(plan.stages, simulated.stages, strict=True):
        assert stage.predicted.idle_share == pytest.approx(found.idle_share, abs=1e-6)
        assert stage.predicted.peak_bytes == found.peak_bytes <= plan.memory_limit_bytes


@pytest.mark.parametrize("seed", (0, 1))
def test_the_memory_of_what_is_kept_is_counted(seed: int) -> None:
    whole, split = plan_of(seed, ("1f1b",)), plan_of(seed, ("zb_h1",))
    assert [stage.blocks for stage in whole.stages] == [stage.blocks for stage in split.stages]
    for place, (stage, other) in enumerate(zip(whole.stages, split.stages, strict=True)):
        (rows,) = (each for each in other.at_rows if each.rows == 4)
        more = other.predicted.activation_bytes - stage.predicted.activation_bytes
        kept = min(place + 1, 6) - 1
        expected = kept * rows.kept_bytes + max(0, rows.kept_bytes - rows.activation_bytes)
        assert more == pytest.approx(expected, abs=4)


def test_less_memory_makes_for_another_order_within_it() -> None:
    free = plan_of(0, ("list_scheduled",))
    fullest = max(stage.predicted.peak_bytes for stage in free.stages)
    least = max(stage.predicted.peak_bytes for stage in plan_of(0, ("1f1b",)).stages)
    tight = plan_of(0, ("list_scheduled",), limit_bytes=(fullest + least) / 2)
    assert max(stage.predicted.peak_bytes for stage in tight.stages) <= tight.memory_limit_bytes < fullest
    assert tight.predicted_step_seconds >= free.predicted_step_seconds * (1 - 1e-6)


def test_a_known_schedule_is_preferred_where_it_is_about_as_fast() -> None:
    problem, solution = found_in(1)
    own = own_order_of(problem, solution)
    assert priced_in(problem, solution, schedule_named(solution.schedule)) == pytest.approx(
        priced(problem, solution).step_seconds  # type: ignore[union-attr]
    )
    faster = in_own_order(problem, replace(solution, step_seconds=2 * priced_in(problem, solution, own)))
    assert faster.own_order == "list_scheduled"
    as_fast = replace(solution, step_seconds=priced_in(problem, solution, own) * 1.001)
    assert in_own_order(problem, as_fast) == as_fast
    assert in_own_order(replace(problem, only_own_order=True), as_fast).own_order == "list_scheduled"
    assert in_own_order(replace(problem, own_order=""), solution) == solution


def test_a_plan_keeps_its_schedule_where_an_own_order_gains_next_to_nothing() -> None:
    base = plan_of(0, ("1f1b",))
    own = simulate_plan(with_own_order(base, "list_scheduled", 1e9, only=True)).step_seconds
    for factor, only, expected in (
        (1.001, False, "1f1b"),
        (1.001, True, "list_scheduled"),
        (1.01, False, "list_scheduled"),
    ):
        taken = with_own_order(base, "list_scheduled", own * factor, only=only)
        assert taken.schedule == expected
        seconds = own * factor if expected == "1f1b" else own
        assert taken.predicted_step_seconds == pytest.approx(seconds, rel=1e-5)


def test_what_was_taken_before_is_told() -> None:
    plan = plan_of(2)
    assert plan.proven_for == ALL[:3] and plan_of(2, ALL[:3]).proven_for == ()
    assert "with 1f1b, fill_drain or zb_h1, for analytic costs" in proof_text(plan)
    if plan.schedule == "list_scheduled":
        assert plan.alternatives[0].reason.startswith("schedule ")
        assert plan.alternatives[0].predicted_step_seconds > plan.predicted_step_seconds  # type: ignore[operator]
    assert plan.schedule in ALL


def test_orders_over_values_that_skip_stages_are_checked() -> None:
    problem, solution = found_in(3)
    assert is_safe(problem, solution, split_line(3, NUM_BLOCKS))
