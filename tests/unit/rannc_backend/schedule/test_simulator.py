"""Predicted steps: what can be worked out by hand comes out exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import INPUT, OUTPUT, Channel, parse_programs
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order
from rannc_backend.schedule.simulator import StageSeconds, simulate
from tests.schedule_lists import ONE_STAGE


def full_edges(num_stages: int, skips: bool = False) -> list[EdgeSpec]:
    """Chain with inputs into all stages and outputs from the last; `skips`: from every stage to every later
    one.
    """
    edges = [
        EdgeSpec(src=INPUT, dst=s, num_forward_values=1, num_gradient_values=1) for s in range(num_stages)
    ]
    edges.append(EdgeSpec(src=num_stages - 1, dst=OUTPUT, num_forward_values=1))
    for src in range(num_stages):
        for dst in range(src + 1, num_stages if skips else min(src + 2, num_stages)):
            edges.append(EdgeSpec(src=src, dst=dst, num_forward_values=1, num_gradient_values=1))
    return edges


@settings(max_examples=100)
@given(
    num_stages=st.integers(1, 8),
    num_micro_batches=st.integers(1, 16),
    schedule=st.sampled_from(ONE_STAGE),
    seconds=st.sampled_from([(1.0, 1.0), (1.0, 2.0), (0.3, 0.5), (2.0, 1.0)]),
    window=st.integers(0, 3),
    skips=st.booleans(),
)
def test_equal_stages_have_the_known_bubble(num_stages, num_micro_batches, schedule, seconds, window, skips):
    """Lowering must add no stall of its own, skips and small windows included."""
    order = build_order(schedule, num_stages, num_micro_batches)
    programs = lower(order, full_edges(num_stages, skips), "train", num_micro_batches, window=window)
    step = simulate(programs, [StageSeconds(forward=seconds[0], backward=seconds[1])] * num_stages)
    bubble = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    assert step.bubble_share == pytest.approx(bubble, abs=1e-9)
    assert step.busy_share + step.bubble_share == pytest.approx(1)
    assert step.makespan_seconds == pytest.approx(sum(seconds) * (num_micro_batches + num_stages - 1))


@pytest.mark.parametrize("phase", ["forward", "infer", "backward"])
def test_one_direction_has_the_known_bubble(phase):
    programs = lower(build_order("fill_drain", 4, 6), full_edges(4, skips=True), phase, 6)
    step = simulate(programs, [StageSeconds(forward=1, backward=1)] * 4, phase=phase)
    assert step.bubble_share == pytest.approx(3 / 9, abs=1e-9)


def test_slowest_stage_binds():
    stages = [StageSeconds(forward=f, backward=2 * f) for f in (1.0, 2.0, 1.0)]
    step = simulate(lower(build_order("1f1b", 3, 32), full_edges(3), "train", 32), stages)
    assert step.busy_seconds == (96.0, 192.0, 96.0)
    # Stage 1 works 192 s. It idles 1 s before 1F0 and 1 s before 1B0 (1F1 ends at 5, 2B0 at 6); 0B31 (2 s)
    # comes after it.
    assert step.makespan_seconds == pytest.approx(1 + 1 + 192 + 2)


def test_a_message_delays_by_its_seconds():
    edges = [EdgeSpec(src=0, dst=1, num_forward_values=1, num_gradient_values=1)]
    messages = {Channel(0, 1, "F"): 0.25, Channel(1, 0, "B"): 0.5}
    step = simulate(
        lower(build_order("1f1b", 2, 1), edges, "train", 1),
        [StageSeconds(forward=1, backward=2)] * 2,
        messages,
    )
    assert step.makespan_seconds == pytest.approx(1 + 0.25 + 1 + 2 + 0.5 + 2)
    assert step.busy_share == pytest.approx(6 / (2 * 6.75))


def test_messages_travel_under_computes():
    """With the receive posted ahead, fill-drain hides transfers that are shorter than a compute; posted late
    it cannot.
    """
    edges = [EdgeSpec(src=0, dst=1, num_forward_values=1)]
    messages = {Channel(0, 1, "F"): 0.5}
    times = {
        window: simulate(
            lower(build_order("fill_drain", 2, 8), edges, "infer", 8, window=window),
            [StageSeconds(forward=1)] * 2,
            messages,
        ).makespan_seconds
        for window in (0, 1)
    }
    assert times[1] == pytest.approx(9.5)
    assert times[0] == pytest.approx(9.5 + 7 * 0.5)


def test_messages_of_a_channel_follow_each_other():
    edges = [EdgeSpec(src=0, dst=1, num_forward_values=1)]
    step = simulate(
        lower(build_order("fill_drain", 2, 4), edges, "infer", 4),
        [StageSeconds(forward=1)] * 2,
        {Channel(0, 1, "F"): 3.0},
    )
    assert step.makespan_seconds == pytest.approx(1 + 4 * 3 + 1)


@pytest.mark.parametrize(
    ("num_buckets", "end"),
    # One bucket: all of the reduction after the backward. Four: the first is full after 1 of 4 s, the last
    # needs 0.5 s.
    [(1, 5 + 2), (4, 5 + 0.5)],
)
def test_reductions_run_under_the_last_backward(num_buckets, end):
    stage = StageSeconds(forward=1, backward=4, allreduce=2, num_buckets=num_buckets)
    assert simulate(
        lower(build_order("1f1b", 1, 1), [], "train", 1), [stage]
    ).makespan_seconds == pytest.approx(end)


def test_memory_peak_is_activations_in_flight():
    stages = [StageSeconds(forward=1, backward=1, activation_bytes=size) for size in (10, 100, 1000)]
    edges = full_edges(3)
    for schedule, peak in (("1f1b", (30, 200, 1000)), ("fill_drain", (50, 500, 5000))):
        assert (
            simulate(lower(build_order(schedule, 3, 5), edges, "train", 5), stages).peak_activation_bytes
            == peak
        )
    order = build_order("fill_drain", 3, 5)
    for phase, peak in (("infer", (0, 0, 0)), ("forward", (50, 500, 5000)), ("backward", (50, 500, 5000))):
        assert simulate(lower(order, edges, phase, 5), stages, phase=phase).peak_activation_bytes == peak


def test_timeline_is_ordered_and_complete():
    programs = lower(build_order("1f1b", 3, 4), full_edges(3), "train", 4)
    step = simulate(programs, [StageSeconds(forward=1, backward=2)] * 3)
    assert [timed.start for timed in step.timeline] == sorted(timed.start for timed in step.timeline)
    for lane, program in programs.items():
        assert tuple(timed.action for timed in step.timeline if timed.lane == lane) == program


def test_stuck_programs_are_refused():
    with pytest.raises(ScheduleError, match="1WF0<0.*waits for 0SF0>1, which no lane does"):
        simulate(parse_programs("lane 0: 0F0\nlane 1: 1RF0<0 1WF0<0 1F0"), [StageSeconds(forward=1)] * 2)


def test_costs_are_checked():
    with pytest.raises(ValueError):
        StageSeconds(forward=-1)
    with pytest.raises(ValueError):
        StageSeconds(forward=1, num_buckets=0)
