"""Schedules by name, and their orders: in which sequence each lane runs its forwards and backwards.

In: a name of the list in `settings/choices.py`, numbers of stages and micro-batches. Out: the `Schedule`; per
lane a tuple of compute actions (`2F0`, `2B0`), without any communication; `lowering` adds that. Everything
after an order reads stages off the actions. And what orders hold: how many micro-batches are in flight at one time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, lru_cache

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import Action, ActionKind, Program
from rannc_backend.schedule.description import Lanes, Order, Schedule
from rannc_backend.schedule.edges import Phase
from rannc_backend.settings import choices

ScheduleName = str
LaneCounts = frozenset[tuple[tuple[int, int], ...]]
# What a computation adds to the micro-batches in flight, and to those that are kept for their W.
IN_FLIGHT = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.BACKWARD_INPUT: -1,
    ActionKind.BACKWARD_WEIGHT: 0,
}
KEPT = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 0,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: -1,
}


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
    ends = ends_of(order)
    return tuple(
        tuple(
            sorted(
                (action for stage in lane for action in order[stage]),
                key=lambda action: (ends[action], action.kind is ActionKind.FORWARD, -action.stage),
            )
        )
        for lane in lanes
    )


def ends_of(order: Order, backward_units: int = 1) -> dict[Action, int]:
    """When each computation ends, if each takes one unit, a whole backward perhaps more, and values come at once.

    Raises:
        ScheduleError: the order gets stuck.
    """
    lane_of = {action.stage: lane for lane, program in enumerate(order) for action in program}
    ends: dict[Action, int] = {}
    places = [0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        lane = waiting.pop()
        program: Program = order[lane]
        while places[lane] < len(program):
            action = program[places[lane]]
            needed = _needed(action, len(lane_of))
            if any(each not in ends for each in needed):
                break
            before = ends[program[places[lane] - 1]] if places[lane] else 0
            units = backward_units if action.kind is ActionKind.BACKWARD else 1
            ends[action] = max([before, *(ends[each] for each in needed)]) + units
            places[lane] += 1
            near = {lane_of.get(action.stage - 1), lane_of.get(action.stage + 1)} - {None, lane}
            waiting += [other for other in near if other is not None]
    for lane, program in enumerate(order):
        if places[lane] < len(program):
            raise ScheduleError("(an order that gets stuck)", action=str(program[places[lane]]))
    return ends


def _needed(action: Action, num_stages: int) -> list[Action]:
    """What other stages must have done before."""
    if action.kind is ActionKind.FORWARD:
        return [Action(action.stage - 1, action.kind, action.micro_batch)] if action.stage else []
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and action.stage + 1 < num_stages:
        # All stages split their backwards, or none does.
        return [Action(action.stage + 1, action.kind, action.micro_batch)]
    return []


@lru_cache(maxsize=64)
def held_by(schedule: Schedule, num_stages: int, num_micro_batches: int) -> tuple[LaneCounts, ...]:
    """By lane of a schedule: of each of its stages how many micro-batches are in flight and how many kept, all that
    occur.
    """
    lanes = schedule.lanes(num_stages)
    found = []
    for program, stages in zip(schedule.order(num_stages, num_micro_batches), lanes, strict=True):
        place = {stage: index for index, stage in enumerate(stages)}
        counts = [[0, 0] for _ in stages]
        seen = {tuple((0, 0) for _ in stages)}
        for action in program:
            count = counts[place[action.stage]]
            count[0] += IN_FLIGHT[action.kind]
            count[1] += KEPT[action.kind]
            seen.add(tuple((flying, kept) for flying, kept in counts))
        found.append(frozenset(seen))
    return tuple(found)


def held_bytes(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    flight_bytes: Sequence[float],
    kept_bytes: Sequence[float],
) -> tuple[float, ...]:
    """By stage, what it holds under the order of a schedule when its lane holds most; both are of one micro-batch of each
    stage.
    """
    lanes = schedule.lanes(num_stages)
    result = [0.0] * num_stages
    for lane, counts in zip(lanes, held_by(schedule, num_stages, num_micro_batches), strict=True):
        flight, kept = ([sizes[stage] for stage in lane] for sizes in (flight_bytes, kept_bytes))
        for stage, num_bytes in zip(lane, fullest(counts, flight, kept), strict=True):
            result[stage] = num_bytes
    return tuple(result)


def fullest(counts: LaneCounts, flight_bytes: Sequence[float], kept_bytes: Sequence[float]) -> list[float]:
    """Of each stage of one lane, what it holds when the lane holds most. `counts`: see `held_by`."""
    held = (
        [
            flying * flight + kept * kept_size
            for flight, kept_size, (flying, kept) in zip(flight_bytes, kept_bytes, each, strict=True)
        ]
        for each in sorted(counts)
    )
    return max(held, key=sum)


def peaks_of(schedule: Schedule, num_stages: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """By stage: the most micro-batches in flight, and kept, that the order of a schedule has at one time."""
    lanes = schedule.lanes(num_stages)
    found = held_by(schedule, num_stages, num_micro_batches)
    peaks = {
        stage: (max(each[place][0] for each in counts), max(each[place][1] for each in counts))
        for lane, counts in zip(lanes, found, strict=True)
        for place, stage in enumerate(lane)
    }
    return tuple(peaks[stage] for stage in range(num_stages))
