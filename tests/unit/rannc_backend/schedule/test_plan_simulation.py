"""Plans in simulated time: the known formula on equal stages, the plan's own prediction, and settings it was
not made for.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.action import NO_MICRO_BATCH
from rannc_backend.schedule.plan_simulation import cost_at, most_micro_batches, replica_rows, simulate_plan
from tests.unit.rannc_backend.ir.sample_plans import GB, MB, replaced, sample_plan


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(("num_stages", "number"), [(1, 4), (2, 1), (2, 8), (4, 8), (4, 32), (8, 16)])
def test_bubble_of_equal_stages(num_stages: int, number: int, schedule: str) -> None:
    plan = sample_plan(
        replicas=(1,) * num_stages,
        num_micro_batches=number,
        message_bytes_per_row=0.0,
        allreduce=0.0,
        batch_rows=256,
    )
    simulation = simulate_plan(plan, schedule)
    assert simulation.idle_share == pytest.approx((num_stages - 1) / (number + num_stages - 1), abs=0.01)
    assert simulation.step_seconds == pytest.approx((number + num_stages - 1) * 0.030, rel=0.01)


def test_own_settings_give_the_predicted_step_and_memory() -> None:
    plan = sample_plan(forward=[0.01, 0.012, 0.009, 0.02], backward=[0.02, 0.024, 0.018, 0.04])
    simulation = simulate_plan(plan)
    assert (simulation.schedule, simulation.num_micro_batches) == ("1f1b", 8)
    assert simulation.step_seconds == pytest.approx(plan.predicted_step_seconds, rel=0.01)
    for stage, simulated in zip(plan.stages, simulation.stages, strict=True):
        assert simulated.peak_bytes == stage.predicted.peak_bytes
        assert simulated.idle_share == pytest.approx(stage.predicted.idle_share, abs=0.001)
        moved = simulated.receive_seconds + simulated.gradient_seconds
        assert moved == pytest.approx(stage.predicted.transfer_seconds, rel=1e-5)


def test_spans_are_all_there_and_do_not_overlap() -> None:
    simulation = simulate_plan(sample_plan(allreduce=0.5))
    for stage in simulation.stages:
        computed = [(span.kind, span.micro_batch) for span in stage.spans if span.kind != "allreduce"]
        assert sorted(computed) == sorted((kind, m) for kind in ("forward", "backward") for m in range(8))
        assert all(a.end <= b.start + 1e-12 for a, b in zip(stage.spans, stage.spans[1:], strict=False))
        (reduction,) = [span for span in stage.spans if span.kind == "allreduce"]
        assert reduction.micro_batch == NO_MICRO_BATCH and reduction == stage.spans[-1]
    assert max(stage.spans[-1].end for stage in simulation.stages) == pytest.approx(simulation.step_seconds)


def test_more_micro_batches_idle_less_and_fill_drain_keeps_more() -> None:
    plan = sample_plan()
    few, many = simulate_plan(plan, num_micro_batches=4), simulate_plan(plan, num_micro_batches=16)
    assert many.idle_share < few.idle_share
    assert many.step_seconds < few.step_seconds
    assert many.stages[0].rows == 8 and few.stages[0].rows == 32
    drained = simulate_plan(plan, "fill_drain")
    assert [stage.num_in_flight for stage in drained.stages] == [8, 8, 8, 8]
    assert [stage.num_in_flight for stage in simulate_plan(plan).stages] == [4, 3, 2, 1]
    for stage, planned in zip(drained.stages, plan.stages, strict=True):
        growth = planned.predicted.activation_bytes * (8 / (4 - stage.index) - 1)
        assert stage.peak_bytes == pytest.approx(planned.predicted.peak_bytes + growth, rel=1e-6)
    assert drained.fits(80 * GB) and not drained.fits(1 * GB)


def test_messages_grow_with_the_rows_and_returned_outputs_do_not() -> None:
    plan = sample_plan()
    last, returned = plan.stages[-1], 3 * GB
    cost = last.predicted
    held = replaced(cost, buffer_bytes=cost.buffer_bytes + returned, peak_bytes=cost.peak_bytes + returned)
    keeping = replaced(plan, stages=(*plan.stages[:-1], replaced(last, predicted=held)))
    for number in (4, 16):
        simulations = [simulate_plan(item, num_micro_batches=number) for item in (plan, keeping)]
        plain, more = (item.stages[-1].peak_bytes for item in simulations)
        # One gradient message of 4 MB per row goes back; the sample counts three into the buffers.
        assert more - plain == pytest.approx(returned, abs=2)
        rows = simulations[0].stages[-1].rows
        entry = cost_at(last, rows)[0]
        states = (
            cost.parameter_bytes
            + cost.gradient_bytes
            + cost.optimizer_bytes
            + entry.workspace_bytes
            + entry.activation_bytes
        )
        assert plain == pytest.approx(states + cost.buffer_bytes + 4 * MB * (rows - 16), rel=1e-6)


def test_costs_between_and_beyond_the_listed_rows() -> None:
    stage = sample_plan().stages[1]
    listed = {entry.rows: entry for entry in stage.at_rows}
    assert sorted(listed) == [8, 16, 32, 128]
    middle, known = cost_at(stage, 24)
    assert known and middle.forward_seconds == pytest.approx(
        (listed[16].forward_seconds + listed[32].forward_seconds) / 2
    )
    assert cost_at(stage, 16) == (listed[16], True)
    beyond, known = cost_at(stage, 256)
    assert not known and beyond.forward_seconds == pytest.approx(2 * listed[128].forward_seconds)
    slow = replaced(listed[128], forward_seconds=1.0)
    bent = replaced(stage, at_rows=(listed[8], listed[16], listed[32], slow))
    assert cost_at(bent, 16 + 4)[0].forward_seconds == pytest.approx(
        1.25 * listed[16].forward_seconds, rel=1e-5
    )
    slope = (1.0 - listed[32].forward_seconds) / 96
    assert cost_at(bent, 256)[0].forward_seconds == pytest.approx(1.0 + 128 * slope, rel=1e-5)
    fewer, known = cost_at(stage, 4)
    assert not known and fewer.forward_seconds == pytest.approx(listed[8].forward_seconds / 2)
    single = replaced(stage, at_rows=(listed[8],))
    assert cost_at(single, 16)[0].backward_seconds == pytest.approx(2 * listed[8].backward_seconds)
    assert not cost_at(single, 16)[1]


def test_what_is_not_listed_is_marked() -> None:
    plan = sample_plan()
    assert all(stage.is_listed for stage in simulate_plan(plan, num_micro_batches=16).stages)
    assert not any(stage.is_listed for stage in simulate_plan(plan, num_micro_batches=128).stages)
    assert most_micro_batches(plan) == 128
    assert replica_rows(plan, 2, 3) == 43


def test_settings_that_cannot_be_simulated() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'magic'"):
        simulate_plan(sample_plan(), "magic")
    with pytest.raises(ValueError, match="micro"):
        simulate_plan(sample_plan(), num_micro_batches=0)


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    number=st.integers(1, 9),
    planned=st.integers(1, 9),
    forward=st.floats(1e-6, 10),
    schedule=st.sampled_from(["1f1b", "fill_drain"]),
)
def test_any_setting_gives_a_step_that_holds_its_parts(
    replicas: list[int], number: int, planned: int, forward: float, schedule: str
) -> None:
    plan = sample_plan(replicas=replicas, num_micro_batches=planned, forward=forward, batch_rows=32)
    simulation = simulate_plan(plan, schedule, number)
    for stage in simulation.stages:
        busy = number * (stage.forward_seconds + stage.backward_seconds)
        assert stage.busy_seconds == pytest.approx(busy, rel=1e-6)
        assert busy <= simulation.step_seconds * (1 + 1e-9)
        assert 0 <= stage.idle_share <= 1 and stage.peak_bytes > 0
