"""Plans keep max_pipeline_bubble_ratio and max_pipeline_unbalance_ratio, and where none can, the error says what would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError, PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.plan_fits_graph import check_options
from rannc_backend.planner.plan_parts import judged
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.search import search
from rannc_backend.planner.settling import settle
from rannc_backend.planner.what_binds import WITHOUT
from rannc_backend.schedule.edges import chain_edges
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.orders import order_on, schedule_names
from rannc_backend.schedule.plan_simulation import schedule_of, shape_of, simulate_plan
from rannc_backend.schedule.simulator import StageSeconds, simulate
from rannc_backend.settings.options import Config
from tests.choice import mostly
from tests.unit.rannc_backend.planner.blocks.block_lines import split_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

KNOWN = ("1f1b", "fill_drain")
ALL = tuple(schedule_names())
SCHEDULES = (KNOWN, ALL, ("list_scheduled",), ("interleaved",), ("zb_v",))
NUM_BLOCKS, ROWS, NUM_DEVICES = 12, 24, 4
BUBBLE, BALANCE = "max_pipeline_bubble_ratio", "max_pipeline_unbalance_ratio"


def plan_of(schedules: tuple[str, ...] = KNOWN, num_devices: int = NUM_DEVICES, **options: Any) -> Plan:
    return plan_blocks(
        split_line(0, NUM_BLOCKS),
        Config(mem_margin=0.0, **options),
        cluster=local_cpu(num_devices, memory_bytes=64 * BYTES_PER_GB),
        batch_rows=ROWS,
        schedules=schedules,
        fingerprint="f" * 64,
    )


def bubble_of(plan: Plan) -> float:
    """By the programs that run, without messages and reductions."""
    number, costs = plan.num_micro_batches, [stage.predicted for stage in plan.stages]
    order = order_on(schedule_of(plan), plan.lanes, number)
    stages = [
        StageSeconds(forward=cost.forward_seconds, backward=cost.backward_seconds, weight=cost.weight_seconds)
        for cost in costs
    ]
    step = simulate(lower_lanes(order, chain_edges(plan.num_stages), "train", number), stages, {})
    counts = [plan.stages[lane[0]].num_replicas for lane in plan.lanes]
    busy = sum(count * seconds for count, seconds in zip(counts, step.busy_seconds, strict=True))
    return 1 - busy / (sum(counts) * step.makespan_seconds)


def balance_of(plan: Plan) -> float:
    seconds = [stage.predicted.forward_seconds + stage.predicted.backward_seconds for stage in plan.stages]
    return min(seconds) / max(seconds)


def what_ifs(plan: Plan) -> dict[str, float | None]:
    return {
        item.change.removeprefix(WITHOUT): item.predicted_step_seconds
        for item in plan.what_if
        if item.change.startswith(WITHOUT)
    }


@pytest.mark.parametrize(
    "schedules",
    mostly([(names,) for names in SCHEDULES], [(KNOWN,), (ALL,), (("zb_v",),)]),
    ids=lambda names: names[0] if len(names) == 1 else str(len(names)),
)
@pytest.mark.parametrize(
    "limits", [{BUBBLE: 0.12}, {BUBBLE: 0.3}, {BALANCE: 0.95}, {BUBBLE: 0.3, BALANCE: 0.8}], ids=str
)
def test_plans_keep_the_limits(schedules: tuple[str, ...], limits: dict[str, float]) -> None:
    asked: dict[str, Any] = {"replica_num": 1, "pipeline_num": 8}
    free = plan_of(schedules, **asked)
    try:
        plan = plan_of(schedules, **asked, **limits)
    except InfeasiblePlanError as error:
        # Only where one stage is not possible is there no plan.
        assert schedules in (("interleaved",), ("zb_v",))
        assert any(name in str(error) for name in limits)
        return
    assert bubble_of(plan) <= limits.get(BUBBLE, 1.0) + 1e-5
    assert balance_of(plan) >= limits.get(BALANCE, 0.0) - 1e-5
    assert shape_of(plan) == pytest.approx((bubble_of(plan), balance_of(plan)), abs=1e-6)
    assert plan.schedule in schedules
    assert plan.predicted_step_seconds >= free.predicted_step_seconds * (1 - 1e-3)
    keeps = bubble_of(free) <= limits.get(BUBBLE, 1.0) and balance_of(free) >= limits.get(BALANCE, 0.0)
    if keeps and not (BUBBLE in limits and free.schedule in KNOWN):
        assert plan.predicted_step_seconds == pytest.approx(free.predicted_step_seconds, rel=1e-3)


@pytest.mark.parametrize("limit", [{BUBBLE: 0.2}, {BALANCE: 0.95}], ids=str)
def test_what_a_limit_costs_is_said_where_it_binds(limit: dict[str, float]) -> None:
    asked: dict[str, Any] = {"replica_num": 1, "pipeline_num": 8}
    free, plan = plan_of(**asked), plan_of(**asked, **limit)
    assert plan.num_stages < free.num_stages and plan.predicted_step_seconds > free.predicted_step_seconds
    name, value = next(iter(limit.items()))
    assert what_ifs(plan)[f"{name}={value:g}"] == pytest.approx(free.predicted_step_seconds, rel=1e-3)


def test_limits_that_do_not_bind_change_nothing() -> None:
    free = plan_of(partition_num=4)
    plan = plan_of(partition_num=4, **{BUBBLE: 0.5, BALANCE: 0.5})
    assert plan.stages == free.stages and plan.predicted_step_seconds == free.predicted_step_seconds
    assert plan.proven_gap == free.proven_gap
    assert not [change for change in what_ifs(plan) if BUBBLE in change or BALANCE in change]


@pytest.mark.parametrize("name", [BUBBLE, BALANCE])
def test_an_error_says_which_value_would_do(name: str) -> None:
    value = {BUBBLE: 0.1, BALANCE: 0.99}[name]
    with pytest.raises(InfeasiblePlanError, match=name) as caught:
        plan_of(partition_num=4, pipeline_num=8, **{name: value})
    would_do = dict(text.split("=") for text in caught.value.options_that_would_do if text.startswith(name))
    near = float(would_do[name])
    assert near > value if name == BUBBLE else near < value
    plan_of(partition_num=4, pipeline_num=8, **{name: near})
    assert f"{WITHOUT}partition_num=4" in caught.value.options_that_would_do


def test_an_error_says_which_values_of_both_would_do() -> None:
    limits = {BUBBLE: 0.1, BALANCE: 0.99}
    with pytest.raises(InfeasiblePlanError, match=f"(?s){BALANCE}.*{BUBBLE}.* and {BALANCE}") as caught:
        plan_of(partition_num=4, pipeline_num=8, **limits)
    text = next(text for text in caught.value.options_that_would_do if " and " in text)
    values = {name: float(value) for name, value in (part.split("=") for part in text.split(" and "))}
    plan_of(partition_num=4, pipeline_num=8, **values)


def test_memory_that_is_too_small_is_said_as_without_limits() -> None:
    with pytest.raises(InfeasiblePlanError, match="the smallest cut needs") as caught:
        plan_of(mem_limit_gb=1e-6, **{BUBBLE: 0.2, BALANCE: 0.5})
    assert caught.value.smallest_bytes is not None


def test_one_stage_is_always_allowed() -> None:
    for options in ({BUBBLE: 1e-6}, {BALANCE: 0.999}):
        plan = plan_of(partition_num=1, **options)
        assert plan.num_stages == 1 and shape_of(plan) == (0.0, 1.0)


def test_split_backwards_may_have_more_stages_than_1f1b() -> None:
    asked: dict[str, Any] = {"replica_num": 1, "pipeline_num": 8, BUBBLE: 0.15}
    assert plan_of(("1f1b",), **asked).num_stages < plan_of(ALL, **asked).num_stages


def test_a_loaded_plan_that_does_not_keep_a_limit_is_refused() -> None:
    plan = plan_of(partition_num=4, pipeline_num=8)
    bubble, balance = shape_of(plan)
    check_options(plan, Config(**{BUBBLE: bubble + 1e-3, BALANCE: balance - 1e-3}), KNOWN)
    for name, value in ((BUBBLE, bubble - 1e-3), (BALANCE, balance + 1e-3)):
        with pytest.raises(PlanError, match=name):
            check_options(plan, Config(**{name: value}), KNOWN)


def test_messages_and_shared_cores_are_no_bubble() -> None:
    """Waiting for a slow link is in the step, and in what a rank idles, but not in the bubble."""
    cluster = local_cpu(2, memory_bytes=64 * BYTES_PER_GB)
    link = replace(cluster.intra_node, bytes_per_second=cluster.intra_node.bytes_per_second / 1e5)
    slow = replace(cluster, intra_node=link, device=replace(cluster.device, core_share=0.5))
    plans = [
        plan_blocks(
            split_line(0, NUM_BLOCKS),
            Config(partition_num=2, pipeline_num=8, max_pipeline_bubble_ratio=0.2),
            cluster=each,
            batch_rows=ROWS,
            schedules=("1f1b",),
            fingerprint="f" * 64,
        )
        for each in (cluster, slow)
    ]
    shares = [simulate_plan(plan).idle_share for plan in plans]
    assert shares[1] > 0.5 > shares[0]
    assert all(bubble_of(plan) <= 0.2 for plan in plans)


@pytest.mark.parametrize("seed", mostly(range(3), [0]))
def test_solutions_are_judged_by_the_programs_that_they_run(seed: int) -> None:
    cluster = local_cpu(3, memory_bytes=64 * BYTES_PER_GB)
    pricer = AnalyticPricer(device=cluster.device)
    for schedules in (("1f1b",), ("zb_h1",), ("list_scheduled",), ("interleaved",), ("zb_v",)):
        config = Config(mem_margin=0.0, pipeline_num=6, replica_num=1)
        request = PlanRequest.of(split_line(seed, 24), config, cluster, pricer, ROWS, schedules, None)
        problem = request.problem(request.costs())
        found = search(problem).solution
        assert found is not None
        solution = settle(problem, found, None)
        shape, schedule, lanes, number = judged(problem, solution)
        plan = plan_blocks(
            split_line(seed, 24),
            config,
            cluster=cluster,
            batch_rows=ROWS,
            schedules=schedules,
            fingerprint="f" * 64,
        )
        assert (lanes, number, str(schedule)) == (plan.lanes, plan.num_micro_batches, plan.schedule)
        assert shape == pytest.approx((bubble_of(plan), balance_of(plan)), abs=1e-4)
