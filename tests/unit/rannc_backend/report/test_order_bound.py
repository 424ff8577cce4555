"""No order of a plan's stages beats the bound that is printed beside its step, and the bound is as near as it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, Channel
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.report.order_bound import order_bound_seconds, order_bound_text
from rannc_backend.report.summary import plan_summary
from rannc_backend.report.tables import plan_report, stdout_console
from rannc_backend.schedule.chain import reduction_seconds
from rannc_backend.schedule.description import Lanes, one_stage_each
from rannc_backend.schedule.edges import EdgeSpec, chain_edges
from rannc_backend.schedule.list_run import LaneCosts, lower_bound_seconds
from rannc_backend.schedule.list_scheduled import ListScheduled
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.orders import on_lanes, order_on, schedule_named, schedule_names
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.schedule.simulator import StageSeconds, simulate
from rannc_backend.settings.options import Config
from tests.choice import mostly
from tests.unit.rannc_backend.planner.blocks.block_lines import split_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

ALL = tuple(schedule_names())


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[StageSeconds], list[float], list[float], Lanes]:
    """Stages with reductions, seconds of the messages between them, and lanes of one, two or three stages."""
    name = draw(st.sampled_from(["1f1b", "interleaved", "interleaved", "zb_v", "v_half"]))
    per_lane = {"1f1b": 1, "zb_v": 2, "v_half": 2}.get(name) or draw(st.integers(2, 3))
    num_stages = per_lane * draw(st.integers(1, 4))
    stages = []
    for _ in range(num_stages):
        backward = draw(st.floats(0.1, 3.0))
        stages.append(
            StageSeconds(
                forward=draw(st.floats(0.1, 2.0)),
                backward=backward,
                weight=backward * draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
                allreduce=draw(st.sampled_from([0.0, 0.5, 5.0])),
                num_buckets=draw(st.sampled_from([1, 2, 5])),
            )
        )
    seconds = st.lists(st.sampled_from([0.0, 0.2, 2.0]), min_size=num_stages, max_size=num_stages)
    described = schedule_named(name)
    made = one_stage_each(num_stages) if name == "1f1b" else described.with_stages_per_lane(per_lane)
    lanes = made if isinstance(made, tuple) else made.lanes(num_stages)
    return stages, draw(seconds), draw(seconds), lanes


def lane_costs(
    stages: list[StageSeconds], messages: list[float], gradients: list[float]
) -> tuple[LaneCosts, ...]:
    return tuple(
        LaneCosts(
            forward=stage.forward,
            inputs=stage.backward - stage.weight,
            weights=stage.weight,
            message=message,
            gradient=gradient,
        )
        for stage, message, gradient in zip(stages, messages, gradients, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(case=chains(), number=st.integers(1, 9), skips=st.booleans())
def test_no_schedule_beats_the_bound(case: Any, number: int, skips: bool) -> None:
    stages, messages, gradients, lanes = case
    count = len(stages)
    costs = lane_costs(stages, messages, gradients)
    late = [
        float(reduction_seconds(np.array(s.backward), np.array(s.allreduce), np.array(s.num_buckets)))
        for s in stages
    ]
    bound = lower_bound_seconds(costs, number, lanes, late)
    assert bound >= lower_bound_seconds(costs, number, lanes)
    lane_of = {stage: lane for lane in lanes for stage in lane}
    seconds = {}
    for stage in range(1, count):
        if lane_of[stage] != lane_of[stage - 1]:
            seconds[Channel(stage - 1, stage, FORWARD_VALUES)] = messages[stage]
            seconds[Channel(stage, stage - 1, GRADIENTS)] = gradients[stage]
    edges = list(chain_edges(count))
    if skips and count > 2 and lane_of[0] != lane_of[count - 1]:
        edges.append(EdgeSpec(src=0, dst=count - 1, num_forward_values=1, num_gradient_values=1))
    tried = 0
    for name in ALL:
        described = on_lanes(schedule_named(name), lanes)
        if described is None:
            continue
        if isinstance(described, ListScheduled):
            if skips:
                continue  # it may get stuck over values that skip stages
            described = replace(described, costs=costs, lanes_of_plan=lanes)
        programs = lower_lanes(order_on(described, lanes, number), edges, "train", number)
        assert simulate(programs, stages, seconds).makespan_seconds >= bound * (1 - 1e-9), name
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("number", [1, 4, 9])
def test_the_bound_by_hand(number: int) -> None:
    costs = (
        LaneCosts(forward=1.0, inputs=2.0, weights=0.5, message=9.0, gradient=9.0),
        LaneCosts(forward=3.0, inputs=4.0, weights=1.0, message=0.25, gradient=0.125),
    )
    # Down and up: 1 + 0.25 + 3 + 4 + 0.125 + 2, then the first stage's W. The last stage begins at 1.25, and after its last I
    # come a message, an I and a W, beside its own W.
    chain = 1 + 0.25 + 3 + 4 + 0.125 + 2 + 0.5
    last = 1.25 + number * 7 + max(0.125 + 2 + 0.5, number * 1.0)
    first = number * 3.5
    assert lower_bound_seconds(costs, number) == pytest.approx(max(chain, last, first))
    # On one lane nothing travels.
    both = number * (3.5 + 8)
    assert lower_bound_seconds(costs, number, ((0, 1),)) == pytest.approx(both)
    assert lower_bound_seconds(costs, number, ((0, 1),), [0.0, 7.0]) >= both
    reduced = lower_bound_seconds(costs, number, reductions=[0.0, 7.0])
    assert reduced == pytest.approx(max(1.25 + 7 + 1 + 7, 1.25 + number * 8 + 7, chain, last, first))


def test_equal_stages_without_second_parts_have_the_bound_of_1f1b() -> None:
    for num_stages, number in ((2, 3), (4, 8), (5, 5)):
        costs = (LaneCosts(forward=1.0, inputs=2.0, weights=0.0),) * num_stages
        assert lower_bound_seconds(costs, number) == pytest.approx((number + num_stages - 1) * 3.0)


def plan_of(schedules: tuple[str, ...], *, seed: int = 0, num_devices: int = 4, **options: Any) -> Plan:
    return plan_blocks(
        split_line(seed, 24),
        Config(mem_margin=0.0, pipeline_num=6, **options),
        cluster=local_cpu(num_devices, memory_bytes=64 * BYTES_PER_GB),
        batch_rows=24,
        schedules=schedules,
        fingerprint="f" * 64,
    )


@pytest.mark.parametrize("seed", mostly(range(4), [0]))
@pytest.mark.parametrize("options", [{"replica_num": 1}, {"partition_num": 2}, {}], ids=str)
def test_no_step_of_a_plan_is_below_its_bound(seed: int, options: dict[str, int]) -> None:
    for schedules in (("1f1b",), ("list_scheduled",), ("interleaved",)):
        plan = plan_of(schedules, seed=seed, **(options if schedules != ("interleaved",) else {}))
        bound = order_bound_seconds(plan)
        assert 0 < bound <= plan.predicted_step_seconds * (1 + 1e-5)
        for name in ALL:
            if on_lanes(schedule_named(name), plan.lanes) is not None:
                assert simulate_plan(plan, name).step_seconds >= bound * (1 - 1e-5), name


def test_cores_that_ranks_share_have_all_of_the_work_to_do() -> None:
    plan = plan_of(("1f1b",), replica_num=1)
    shared = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"core_share": 0.25})})
    work = plan.num_micro_batches * sum(
        stage.predicted.forward_seconds + stage.predicted.backward_seconds for stage in plan.stages
    )
    assert order_bound_seconds(shared) == pytest.approx(work) and order_bound_seconds(plan) < 0.5 * work


def test_the_bound_is_shown_beside_the_step() -> None:
    plan = plan_of(("1f1b",), replica_num=1)
    bound = order_bound_seconds(plan)
    longer = plan.predicted_step_seconds / bound - 1
    assert longer > 0.01
    console = stdout_console(200, record=True)
    for section in plan_report(plan):
        console.print(section)
    text = " ".join(console.export_text().split())
    assert (
        f"lower bound no order of these stages takes less than {bound:.3g} s; this one takes {100 * longer:.0f} % longer"
        in text
    )
    assert plan_summary(plan)["order_bound_seconds"] == bound
    assert order_bound_text(plan, plan.predicted_step_seconds) == "this one takes as long"
