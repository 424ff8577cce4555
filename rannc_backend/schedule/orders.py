"""Schedules by name, and their orders: in which sequence each lane runs its forwards and backwards.

In: a name of the list in `settings/choices.py`, numbers of stages and micro-batches. Out: the `Schedule`; per
lane a tuple of compute actions (`2F0`, `2B0`), without any communication; `lowering` adds that. Everything
after an order reads stages off the actions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from rannc_backend.ir.action import ActionKind, Program
from rannc_backend.schedule.description import Order, Schedule
from rannc_backend.schedule.edges import Phase
from rannc_backend.settings import choices

ScheduleName = str


def schedule_names() -> tuple[str, ...]:
    """Of all schedules, those preferred where they are equally fast first."""
    return tuple(choices.SCHEDULES)


def schedule_named(name: str) -> Schedule:
    """The description of a schedule. ValueError for an unknown name."""
    module = choices.SCHEDULES.get(name)
    if module is None:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(schedule_names())}")
    return _described_in(module)


@cache
def _described_in(module: str) -> Schedule:
    schedule = importlib.import_module(module).SCHEDULE
    assert isinstance(schedule, Schedule), f"{module}.SCHEDULE is no schedule"
    return schedule


def build_order(name: str, num_stages: int, num_micro_batches: int, *, training: bool = True) -> Order:
    """The order of a schedule by name; only its forwards when not `training`. ValueError for an unknown
    name.
    """
    schedule = schedule_named(name)
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(
            f"need at least one stage and one micro-batch, got {num_stages} and {num_micro_batches}"
        )
    order = schedule.order(num_stages, num_micro_batches)
    return order if training else select_phase(order, "infer")


def select_phase(order: Sequence[Program], phase: Phase) -> Order:
    """The part of an order that runs in `phase`: everything in "train", else only forwards or only the
    rest.
    """
    if phase == "train":
        return tuple(tuple(lane) for lane in order)
    forwards = phase in ("forward", "infer")
    return tuple(tuple(a for a in lane if (a.kind is ActionKind.FORWARD) == forwards) for lane in order)
