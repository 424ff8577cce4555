"""Orders: in which sequence each stage runs its forwards and backwards.

In: numbers of stages and micro-batches. Out: per lane a tuple of compute actions (`2F0`, `2B0`), without any
communication; `lowering` adds that. In the first version lane s runs stage s only. An order that gives a lane several
stages, or that splits B into I and W, is another function here: everything after it reads stages off the actions.

Backwards run in ascending micro-batches in both schedules, so that gradients are summed in the same sequence and the
results of the two are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ..ir.action import Action, ActionKind, Program
from .edges import Phase

ScheduleName = Literal["1f1b", "fill_drain"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
Order = tuple[Program, ...]


def fill_drain(num_stages: int, num_micro_batches: int) -> Order:
    """All forwards, then all backwards (GPipe)."""
    _check_counts(num_stages, num_micro_batches)
    return tuple(
        tuple(_forward(stage, m) for m in range(num_micro_batches))
        + tuple(_backward(stage, m) for m in range(num_micro_batches))
        for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Order:
    """Stage s runs num_stages - s - 1 forwards ahead, then one forward and one backward in turn (PipeDream-flush)."""
    _check_counts(num_stages, num_micro_batches)
    order: list[Program] = []
    for stage in range(num_stages):
        num_ahead = min(num_stages - stage - 1, num_micro_batches)
        lane = [_forward(stage, m) for m in range(num_ahead)]
        for m in range(num_micro_batches):
            if m + num_ahead < num_micro_batches:
                lane.append(_forward(stage, m + num_ahead))
            lane.append(_backward(stage, m))
        order.append(tuple(lane))
    return tuple(order)


def build_order(schedule: ScheduleName, num_stages: int, num_micro_batches: int, *, training: bool = True) -> Order:
    """The order of a schedule by name; only its forwards when not `training`. ValueError for an unknown name."""
    if schedule == "1f1b":
        order = one_f_one_b(num_stages, num_micro_batches)
    elif schedule == "fill_drain":
        order = fill_drain(num_stages, num_micro_batches)
    else:
        raise ValueError(f"unknown schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    return order if training else select_phase(order, "infer")


def select_phase(order: Sequence[Program], phase: Phase) -> Order:
    """The part of an order that runs in `phase`: everything in "train", else only forwards or only the rest."""
    if phase == "train":
        return tuple(tuple(lane) for lane in order)
    forwards = phase in ("forward", "infer")
    return tuple(tuple(a for a in lane if (a.kind is ActionKind.FORWARD) == forwards) for lane in order)


def in_flight_bounds(schedule: ScheduleName, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Per stage, how many micro-batches may have saved values at one time."""
    if schedule == "1f1b":
        return tuple(min(num_micro_batches, num_stages - stage) for stage in range(num_stages))
    return (num_micro_batches,) * num_stages


def _forward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.FORWARD, micro_batch)


def _backward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.BACKWARD, micro_batch)


def _check_counts(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(f"need at least one stage and one micro-batch, got {num_stages} and {num_micro_batches}")
