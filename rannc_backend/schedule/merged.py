"""Orders of stages that are lanes of their own, put together for lanes that have several stages.

In: an order in which lane s runs stage s, and the lanes. Out: an order of the lanes. Each stage keeps its sequence, so what
the schedule says of its memory and of the sequence of its sums holds.

Nothing hangs: the computations are merged in the sequence of their ends in a run of the order in which each takes one unit
of time. All that one of them needs has ended before it, so the sequence of all lanes together is one that can be done.
"""

from __future__ import annotations

from rannc_backend.ir.action import Action, ActionKind, Program
from rannc_backend.schedule.description import Lanes, Order, Schedule

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


def order_on(schedule: Schedule, lanes: Lanes, num_micro_batches: int) -> Order:
    """The order of a schedule on lanes, also where those are not the ones that it is made for.

    Raises:
        ValueError: the schedule is for several stages per lane, and these lanes are others.
    """
    num_stages = sum(map(len, lanes))
    if schedule.stages_per_lane == 1:
        order = schedule.order(num_stages, num_micro_batches)
        return order if len(order) == len(lanes) else merged(order, lanes)
    if not runs_on(schedule, lanes):
        raise ValueError(f"schedule {schedule} does not run on lanes {lanes}")
    return schedule.order(num_stages, num_micro_batches)


def runs_on(schedule: Schedule, lanes: Lanes) -> bool:
    """Whether a schedule has an order for these lanes."""
    num_stages = sum(map(len, lanes))
    if schedule.stages_per_lane == 1:
        return True
    return num_stages % schedule.stages_per_lane == 0 and schedule.lanes(num_stages) == lanes


def merged(order: Order, lanes: Lanes) -> Order:
    """See the module docstring."""
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
    if action.kind in _BACKWARDS and action.stage + 1 < len(order):
        # All stages split their backwards, or none does.
        return [Action(action.stage + 1, action.kind, action.micro_batch)]
    return []
