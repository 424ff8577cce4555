"""Schedules by name, and their orders: in which sequence each lane runs its forwards and backwards.

In: a name of the list in `settings/choices.py`, numbers of stages and micro-batches. Out: the `Schedule`; per
lane a tuple of compute actions (`2F0`, `2B0`), without any communication; `lowering` adds that. Everything
after an order reads stages off the actions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from rannc_backend.ir.action import Action, ActionKind, Program
from rannc_backend.schedule.description import Lanes, Order, Schedule
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
def _described_in(place: str) -> Schedule:
    module, _, name = place.partition(":")
    schedule = getattr(importlib.import_module(module), name or "SCHEDULE")
    assert isinstance(schedule, Schedule), f"{place} is no schedule"
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


def order_on(schedule: Schedule, lanes: Lanes, num_micro_batches: int) -> Order:
    """The order of a schedule on lanes, also where those are not the ones that it is made for.

    Raises:
        ValueError: the schedule is for several stages per lane, and these lanes are others.
    """
    described = on_lanes(schedule, lanes)
    if described is None:
        raise ValueError(f"schedule {schedule} does not run on lanes {lanes}")
    order = described.order(sum(map(len, lanes)), num_micro_batches)
    return order if len(order) == len(lanes) else merged(order, lanes)


def on_lanes(schedule: Schedule, lanes: Lanes) -> Schedule | None:
    """The schedule as it runs on these lanes: with as many stages on each of them, or, if it is one for a stage on each,
    as it is; None where it has no order for them.
    """
    if schedule.stages_per_lane == 1:
        return schedule
    made = schedule.with_stages_per_lane(len(lanes[0]))
    return made if made is not None and made.lanes(sum(map(len, lanes))) == lanes else None


def merged(order: Order, lanes: Lanes) -> Order:
    """An order in which lane s runs stage s, for lanes that have several stages. Each stage keeps its sequence, so what the
    schedule says of its memory and of the sequence of its sums holds.

    Nothing hangs: the computations are merged in the sequence of their ends in a run of the order in which each takes one
    unit of time. All that one of them needs has ended before it, so the sequence of all lanes together can be done.
    """
    ends = _unit_ends(order)
    return tuple(
        tuple(
            sorted(
                (action for stage in lane for action in order[stage]),
                key=lambda action: (ends[action], action.kind is ActionKind.FORWARD, -action.stage),
            )
        )
        for lane in lanes
    )


def _unit_ends(order: Order) -> dict[Action, int]:
    """When each computation of a chain ends, if each takes one unit and values come at once."""
    ends: dict[Action, int] = {}
    places = [0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        stage = waiting.pop()
        program: Program = order[stage]
        while places[stage] < len(program):
            action = program[places[stage]]
            needed = _needed(action, order)
            if any(each not in ends for each in needed):
                break
            before = ends[program[places[stage] - 1]] if places[stage] else 0
            ends[action] = max([before, *(ends[each] for each in needed)]) + 1
            places[stage] += 1
            waiting += [other for other in (stage - 1, stage + 1) if 0 <= other < len(order)]
    assert len(ends) == sum(map(len, order)), "an order that gets stuck"
    return ends


def _needed(action: Action, order: Order) -> list[Action]:
    """What other stages must have done before."""
    if action.kind is ActionKind.FORWARD:
        return [Action(action.stage - 1, action.kind, action.micro_batch)] if action.stage else []
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and action.stage + 1 < len(order):
        # All stages split their backwards, or none does.
        return [Action(action.stage + 1, action.kind, action.micro_batch)]
    return []
