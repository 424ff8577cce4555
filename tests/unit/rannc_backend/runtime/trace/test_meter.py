"""What is measured of a step: which steps count, which seconds go where, which bytes are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rannc_backend.ir.action import Action, ActionKind
from rannc_backend.runtime.trace.allocations import AllocationTracker, unique_bytes
from rannc_backend.runtime.trace.meter import NUM_WARM_UP_STEPS, HostClock, StepMeter, StepRecord

KILOBYTE = 256  # elements of float32
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
PROGRAM = (
    Action(kind=ActionKind.WAIT_FORWARD, stage=0, peer=-1, micro_batch=0),
    Action(kind=F, stage=0, micro_batch=0),
    Action(kind=B, stage=0, micro_batch=0),
    Action(kind=ActionKind.WAIT_REDUCTIONS, stage=0),
)


def meter_of(num_steps: int = 2, expected_rows: int = 8, **members: Any) -> tuple[StepMeter, list[Any]]:
    told: list[Any] = []
    meter = StepMeter(
        device=torch.device("cpu"),
        stages=(0,),
        num_steps=num_steps,
        expected_rows=expected_rows,
        model_tensors=members.get("model_tensors", ()),
        gradient_tensors=members.get("gradient_tensors", lambda: ()),
        message_tensors=members.get("message_tensors", lambda: ()),
        deliver=told.append,
    )
    return meter, told


def run(
    record: StepRecord | None, seconds: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0), *, complete: bool = True
) -> None:
    """One step whose actions take so long."""
    if record is None:
        return
    marks = record.marks_of(PROGRAM)
    marks += [sum(seconds[:count]) for count in range(len(seconds) + 1)]
    record.spans[-1] = [0.0]
    record.mark = lambda: 100.0
    record.stop(complete=complete)


def step(
    meter: StepMeter, rows: int = 8, seconds: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0), **members: Any
) -> StepRecord | None:
    record = meter.begin(rows, 1, ())
    run(record, seconds, **members)
    return record


def test_warm_up_then_memory_then_timed_steps_then_nothing() -> None:
    meter, _ = meter_of(num_steps=2)
    records = [step(meter) for _ in range(NUM_WARM_UP_STEPS + 5)]
    assert [record is not None for record in records] == [False, False, True, True, True, False, False]
    assert [record.tracker is not None for record in records if record] == [True, False, False]


def test_seconds_are_medians_by_what_was_done() -> None:
    meter, _ = meter_of(num_steps=3)
    for _ in range(NUM_WARM_UP_STEPS + 1):
        step(meter, seconds=(50.0, 50.0, 50.0, 50.0))
    assert meter.measured() is None
    for scale in (1.0, 9.0, 2.0):
        assert meter.measured() is None
        step(meter, seconds=(scale, 2 * scale, 4 * scale, 8 * scale))
    measured = meter.measured()
    assert measured is not None
    names = ("waiting", "reducing", "sending")
    assert [measured[f"{name}_seconds"] for name in names] == [2.0, 16.0, 0.0]
    assert measured["stages"] == {"0": {"forward_seconds": 4.0, "backward_seconds": 8.0}}
    assert measured["step_seconds"] == 100.0 and measured["num_steps"] == 3
    assert meter.measured() is None, "told once"


def test_a_last_step_without_backward_is_waited_for_and_left_out() -> None:
    meter, _ = meter_of(num_steps=2)
    for _ in range(NUM_WARM_UP_STEPS + 2):
        step(meter)
    step(meter, complete=False)
    assert meter.measured() is None, "its backward may still come"
    assert meter.begin(8, 1, ()) is None
    measured = meter.measured()
    assert measured is not None and measured["num_steps"] == 1


def test_no_step_with_gradients_is_no_record_at_all() -> None:
    meter, _ = meter_of(num_steps=1)
    for _ in range(NUM_WARM_UP_STEPS + 2):
        step(meter, complete=False)
    meter.begin(8, 1, ())
    assert meter.measured() == {}


def test_a_step_that_ran_twice_is_left_out() -> None:
    meter, _ = meter_of(num_steps=2)
    records = [step(meter) for _ in range(NUM_WARM_UP_STEPS + 3)]
    records[-2].spoiled = True
    measured = meter.measured()
    assert measured is not None and measured["num_steps"] == 1


@pytest.mark.parametrize(("rows", "chosen"), [((8, 6, 6), 8), ((4, 6, 6), 6), ((7, 6, 5), 7)])
def test_steps_of_one_size_are_compared_the_planned_one_first(rows: tuple[int, ...], chosen: int) -> None:
    meter, _ = meter_of(num_steps=3, expected_rows=8)
    for count in (8, 8, 8, *rows):
        step(meter, rows=count)
    measured = meter.measured()
    assert measured is not None
    assert (measured["num_rows"], measured["num_steps"]) == (chosen, rows.count(chosen))


def test_peak_is_what_is_always_there_and_the_most_that_a_step_made() -> None:
    weight = torch.nn.Parameter(torch.zeros(KILOBYTE))
    gradient = torch.zeros(2 * KILOBYTE)
    # Two views of one memory: a published gradient and its buffer.
    meter, _ = meter_of(
        num_steps=1, model_tensors=(weight,), gradient_tensors=lambda: [gradient, gradient[:5]]
    )
    other = torch.nn.Parameter(torch.zeros(KILOBYTE))
    optimizer = torch.optim.Adam([weight, other], lr=0.1)
    for _ in range(NUM_WARM_UP_STEPS + 2):
        record = meter.begin(8, 1, ())
        if record is not None:
            with record.following():
                kept = torch.ones(4 * KILOBYTE)
                kept.mul(2.0)
            del kept
        run(record)
        weight.grad = torch.ones(KILOBYTE)
        other.grad = torch.ones(KILOBYTE)
        optimizer.step()
    measured = meter.measured()
    assert measured is not None
    assert (measured["weight_bytes"], measured["gradient_bytes"], measured["step_bytes"]) == (
        1024,
        2048,
        8192,
    )
    assert measured["optimizer_bytes"] == 2 * 1024 + 4, (
        "two moments and a counter, of this model's parameter only"
    )
    assert measured["peak_bytes"] == 1024 + 2048 + 8192 + 2052


def test_tracker_counts_memory_once_while_it_lives() -> None:
    before = torch.ones(KILOBYTE)
    tracker = AllocationTracker([before])
    with tracker.following():
        first = before + 1
        view = first.view(-1).t()
        before.add_(1)
        assert tracker.live_bytes == 1024
        del first
        assert tracker.live_bytes == 1024, "a view keeps the memory"
        del view
        assert tracker.live_bytes == 0
        for _ in range(3):
            before + 1
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 1024)
    with tracker.following():
        second = torch.empty(3 * KILOBYTE)
    outside = torch.empty(2 * KILOBYTE)
    tracker.add([second, before, outside, None, 3])
    assert tracker.peak_bytes == 5 * 1024
    assert unique_bytes([second, second[1:], before]) == 4 * 1024


def test_host_clock_counts_seconds() -> None:
    clock = HostClock()
    begin = clock.mark()
    assert clock.seconds(begin, begin + 2.0) == pytest.approx(2.0)
    assert clock.mark() >= begin
