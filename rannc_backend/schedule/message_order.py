"""When the operations of messages are queued on devices, where several channels share a queue and anything
may wait for a device.

In: the programs of all lanes. Out: the messages between two lanes in the order in which they are queued, each
with its *place* in the program of either lane.

Facts. A communicator runs its operations one after the other, each when both ends have come to it. Whatever
waits for the device on the host (autotuning, a module that is loaded, an allocator that tries again) waits
for all operations that are queued, messages included. So an operation is not queued where its program posts
it, but at its moment: that of one run of all programs at which both of its ends had been posted. That
run, in which a forward takes one unit of time and a backward two, came to its end.

Why nothing can hang. The moments of the run are in one order, the same for all ranks, and those that concern
a rank lie at places of its program. (1) Both ends of a communicator queue the same operations in the same
order: directions that share one do not wait for each other. (2) Whatever an action or an operation needs (its
wait, a message ahead of it in a queue, memory, the actions before it) had its moment before it. (3) A rank
that waits for its whole device within an action waits for operations of earlier moments only, and the other
end of each is queued by a rank that stands before that moment, or that waits for its own device in a still
earlier one. So of all that is left to do, what comes first in that order can always be done. How long things
really take does not matter. Sums over the replicas of a stage are queued in one action by all of them, those
over several stages after all actions (`runtime/gradients/buckets.py`): (3) holds for them too.

What it costs: nothing while the host runs ahead of its device, as operations start when their memory is
ready, not when they are queued.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import (
    Action,
    ActionKind,
    Channel,
    OrderedMessage,
    Program,
)

_FORWARD_UNITS, _BACKWARD_UNITS = 1.0, 2.0


_Key = tuple[Channel, int]
_End = tuple[_Key, int, bool]  # of a message: lane, and whether it sends


@dataclass(slots=True)
class _Run:
    programs: Mapping[int, Program]
    num_ends: dict[tuple[_Key, bool], int]  # lanes that send, that receive
    place: dict[int, int]  # by lane: the next action
    ready: list[tuple[float, int]]  # (time, lane)
    ordered: list[OrderedMessage] = field(default_factory=list)
    posted: dict[tuple[_Key, bool], list[int]] = field(default_factory=lambda: defaultdict(list))  # lanes
    num_missing: dict[_End, int] = field(default_factory=dict)  # partners that have not posted
    sleeping: set[_End] = field(default_factory=set)


def message_order(programs: Mapping[int, Program]) -> tuple[OrderedMessage, ...]:
    """The messages of one call in the order of their moments.

    Args:
        programs: by lane; ranks that have the roles of endpoints alone are one more lane.

    Raises:
        ScheduleError: the programs get stuck.
    """
    num_ends: dict[tuple[_Key, bool], int] = defaultdict(int)
    for program in programs.values():
        for action in program:
            if action.is_send or action.is_receive:
                num_ends[(action.channel, action.micro_batch), action.is_send] += 1
    run = _Run(programs, num_ends, dict.fromkeys(programs, 0), [(0.0, lane) for lane in sorted(programs)])
    while run.ready:
        time, lane = heapq.heappop(run.ready)
        if run.place[lane] < len(programs[lane]):
            action = programs[lane][run.place[lane]]
            if _step(run, lane, action, time):
                heapq.heappush(run.ready, (time + _units(action), lane))
    for lane, program in programs.items():
        if run.place[lane] < len(program):
            text = f"(stage {lane}, action number {run.place[lane]}) never ends"
            raise ScheduleError(text, action=str(program[run.place[lane]]))
    return tuple(run.ordered)


def _units(action: Action) -> float:
    if not action.is_compute:
        return 0.0
    return _FORWARD_UNITS if action.kind is ActionKind.FORWARD else _BACKWARD_UNITS


def _step(run: _Run, lane: int, action: Action, time: float) -> bool:
    """Do the lane's next action; False, and noted, where it must wait."""
    if action.is_compute or action.kind in (ActionKind.ALLOW_REDUCTIONS, ActionKind.WAIT_REDUCTIONS):
        run.place[lane] += 1
        return True
    key = (action.channel, action.micro_batch)
    if action.is_send or action.is_receive:
        run.place[lane] += 1
        _post(run, key, lane, time, sends=action.is_send)
        return True
    end = (key, lane, not action.is_wait)
    if run.num_missing.get(end) == 0:
        run.place[lane] += 1
        return True
    run.sleeping.add(end)
    return False


def _post(run: _Run, key: _Key, lane: int, time: float, *, sends: bool) -> None:
    run.posted[key, sends].append(lane)
    partners = run.posted[key, not sends]
    run.num_missing[key, lane, sends] = run.num_ends[key, not sends] - len(partners)
    for partner in partners:
        sender, receiver = (lane, partner) if sends else (partner, lane)
        run.ordered.append(OrderedMessage(*key, sender, receiver, run.place[sender], run.place[receiver]))
        end = (key, partner, not sends)
        run.num_missing[end] -= 1
        if run.num_missing[end] == 0 and end in run.sleeping:
            run.sleeping.remove(end)
            heapq.heappush(run.ready, (time, partner))
