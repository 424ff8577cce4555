"""Lowering: from an order of forwards and backwards to the complete program of each lane.

In: an order (`orders`), the edge table (`edges`), the phase. Out: per lane one tuple of actions, the messages
of the stage and those of the endpoint roles that every rank has (owner of input rows, owner of output rows)
merged.

What transport guarantees, and nothing more: sends and receives are posted without blocking; a message travels
once both ends have posted it, so a wait (W) blocks until the send is posted and a done (D) until the receive
is posted (rendezvous); a channel matches its messages in order. Hence:

- Receives are posted `window` micro-batches ahead of their use, waits stand right before the compute action
  that uses the values, sends right after the one that made them. At window 1 a message travels under a whole
  compute action.
- A done stands right before the compute action that makes the `credit`-th message after it: at most `credit`
  messages of a channel lie in send buffers. credit is the number of stages that the message spans plus one (2
  for neighbours), which is what lockstep running needs to never stall, and at most the micro-batches in
  flight plus one. In "train" a forward message is also done before the next backward, so that send buffers
  fall with the micro-batches in flight.
- A gradient that skips stages is needed `span` backwards after it was made. What credit does not cover is
  covered by posting its receive earlier: credit + window > span.
- Input rows belong to the user for the whole call: all are sent at the start and done at the end. So are
  gradients of outputs. Receives of output rows are posted when the lane reaches the same micro-batch, and
  waited for at the end.
- Between stages of one lane nothing travels, and nobody waits: the receive is posted before the compute action that makes
  the value, the send is done before the next one.
- Reductions are allowed right before a stage's last backward (gradients are then complete as they are written) and
  waited for at the end.

Why this cannot hang: let the level of B(k) be k and that of F(k) on stage s be k minus its micro-batches in
flight. What a compute action waits for (values, earlier actions of its lane, dones, posted receives) has a
lower level, or the same level and a stage nearer to the source of the value. `verify` checks it anyway, for
every program that is run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import FORWARD_VALUES, INPUT, OUTPUT, Action, ActionKind, Channel, Program
from rannc_backend.schedule.description import Order, Schedule
from rannc_backend.schedule.edges import EdgeSpec, Phase, active_channels, is_training
from rannc_backend.schedule.orders import ends_of, select_phase
from rannc_backend.schedule.simulator import run_to_end

# Kinds by direction of the channel: what makes a message, then the four steps of moving it.
_MAKERS = {"F": (ActionKind.FORWARD,), "B": (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)}
_SEND = {"F": ActionKind.SEND_FORWARD, "B": ActionKind.SEND_GRADIENT}
_RECEIVE = {"F": ActionKind.RECEIVE_FORWARD, "B": ActionKind.RECEIVE_GRADIENT}
_WAIT = {"F": ActionKind.WAIT_FORWARD, "B": ActionKind.WAIT_GRADIENT}
_DONE = {"F": ActionKind.DONE_FORWARD, "B": ActionKind.DONE_GRADIENT}
_PARAMETER_GRADIENT_KINDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


_Placed = tuple[int, Action]
"""A part of a message, and which message of its channel it is: the order may have the micro-batches in any
sequence.
"""


@dataclass(slots=True)
class _Lane:
    """A program under construction. Slot i surrounds compute action i; the slot after the last is the end."""

    compute: Program
    first_sends: list[_Placed] = field(default_factory=list)
    receives: defaultdict[int, list[_Placed]] = field(default_factory=lambda: defaultdict(list))
    dones: defaultdict[int, list[_Placed]] = field(default_factory=lambda: defaultdict(list))
    waits: defaultdict[int, list[_Placed]] = field(default_factory=lambda: defaultdict(list))
    allows: defaultdict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))
    sends: defaultdict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))

    @property
    def end(self) -> int:
        return len(self.compute)

    def steps(self, direction: str, stage: int | None = None) -> dict[int, int]:
        """micro-batch -> slot in which `stage` (None: the first of any stage) makes or uses messages of
        `direction`.
        """
        slots: dict[int, int] = {}
        for slot, action in enumerate(self.compute):
            if action.kind in _MAKERS[direction] and stage in (None, action.stage):
                slots.setdefault(action.micro_batch, slot)
        return slots

    def program(self) -> Program:
        actions = _in_sequence(self.first_sends)
        for slot in range(self.end + 1):
            # Receives first: posting never blocks and lets peers go on.
            for group in (self.receives, self.dones, self.waits):
                actions.extend(_in_sequence(group[slot]))
            actions.extend(self.allows[slot])
            if slot < self.end:
                actions.append(self.compute[slot])
                actions.extend(sorted(self.sends[slot], key=_nearest_first))
        stages = sorted(
            {action.stage for actions_of_slot in self.allows.values() for action in actions_of_slot}
        )
        # Last: sums in shared memory go on only while all their ranks wait for them, so no rank may need
        # another thing of one that waits.
        actions.extend(Action(stage, ActionKind.WAIT_REDUCTIONS) for stage in stages)
        return tuple(actions)


def lower(
    order: Sequence[Program],
    edges: Iterable[EdgeSpec],
    phase: Phase,
    num_micro_batches: int,
    *,
    window: int = 1,
    windows: Mapping[tuple[int, int], int] | None = None,
    first_at_begin: bool = False,
) -> dict[int, Program]:
    """The program of each lane.

    Args:
        order: per lane the compute actions; those that do not run in `phase` are left out.
        edges: who talks to whom.
        phase: what one call of the programs does.
        num_micro_batches: micro-batches of the call.
        window: how many micro-batches ahead of their use receives are posted (0: right before).
        windows: larger ones, by (source, destination).
        first_at_begin: the first ones, as many as the window has, at the begin of the program.

    Raises:
        ValueError: an edge names a stage that the order does not run, or a count is out of range.
    """
    if window < 0 or num_micro_batches < 1:
        raise ValueError(f"window {window} must be >= 0 and num_micro_batches {num_micro_batches} >= 1")
    lanes = [_Lane(compute) for compute in select_phase(order, phase)]
    lane_of_stage = {action.stage: lane for lane in lanes for action in lane.compute}
    for channel in active_channels(edges, phase):
        unknown = [place for place in channel[:2] if place >= 0 and place not in lane_of_stage]
        if unknown:
            raise ValueError(f"channel {channel} names stage {unknown[0]}, which the order does not run")
        own = max(window, (windows or {}).get((channel.source, channel.destination), 0))
        _lower_channel(channel, lanes, lane_of_stage, phase, own, first_at_begin)
    if is_training(phase):
        _add_reductions(lane_of_stage)
    return {index: lane.program() for index, lane in enumerate(lanes)}


def lower_lanes(
    order: Sequence[Program], edges: Iterable[EdgeSpec], phase: Phase, num_micro_batches: int
) -> dict[int, Program]:
    """As `lower`, also where lanes have several stages: with windows with which nobody waits to send (`receive_windows`), and
    if programs get stuck for what skips stages, with larger ones.

    There are such: with all receives posted at the begin, nothing but values is waited for, and those come in the sequence
    in which an order that can be done makes them.

    Raises:
        ScheduleError: the order cannot be done.
    """
    edges = tuple(edges)
    if len(order) == len({action.stage for lane in order for action in lane}):
        return lower(order, edges, phase, num_micro_batches)
    window, windows = 1, receive_windows(select_phase(order, phase))
    while True:
        programs = lower(
            order, edges, phase, num_micro_batches, window=window, windows=windows, first_at_begin=True
        )
        try:
            run_to_end(programs)
        except ScheduleError:
            if window >= num_micro_batches:
                raise
            window = min(2 * window, num_micro_batches)
        else:
            return programs


def receive_windows(order: Order) -> dict[tuple[int, int], int]:
    """By (source, destination) of neighbouring stages on two lanes: how many micro-batches ahead receives are posted so that
    no message that is made waits for its receive, if forwards take one unit, whole backwards two, and messages nothing.
    """
    ends = ends_of(order, backward_units=2)
    lane_of = {action.stage: lane for lane, program in enumerate(order) for action in program}
    made: dict[tuple[int, int], list[int]] = {}
    used: dict[tuple[int, int], list[int]] = {}
    for action, end in ends.items():
        kind, stage = action.kind, action.stage
        if kind is ActionKind.BACKWARD_WEIGHT:
            continue
        is_forward = kind is ActionKind.FORWARD
        following, before = (stage + 1, stage - 1) if is_forward else (stage - 1, stage + 1)
        if lane_of.get(following, lane_of[stage]) != lane_of[stage]:
            made.setdefault((stage, following), []).append(end)
        if lane_of.get(before, lane_of[stage]) != lane_of[stage]:
            begin = end - (2 if kind is ActionKind.BACKWARD else 1)
            used.setdefault((before, stage), []).append(begin)
    windows = {}
    for pair, times in made.items():
        begins = sorted(used.get(pair, ()))
        windows[pair] = max(
            place - bisect_right(begins, time) + 1 for place, time in enumerate(sorted(times))
        )
    return windows


def waiting_bytes(
    schedule: Schedule, num_micro_batches: int, values: Sequence[float], gradients: Sequence[float]
) -> tuple[float, ...]:
    """`waiting_in` of the order of a schedule, which is for the lanes of these stages."""
    windows = _windows(schedule, len(values), num_micro_batches)
    return _waiting(windows, values, gradients)


def waiting_in(order: Order, values: Sequence[float], gradients: Sequence[float]) -> tuple[float, ...]:
    """By stage, the bytes of messages that have come before they are used, beside one of values and one of gradients: what
    `receive_windows` asks for.

    Args:
        order: of lanes some of which have several stages.
        values: by stage, what comes of a micro-batch from the stage before.
        gradients: by stage, what goes back there.
    """
    return _waiting(receive_windows(order), values, gradients)


def _waiting(
    windows: Mapping[tuple[int, int], int], values: Sequence[float], gradients: Sequence[float]
) -> tuple[float, ...]:
    num_stages = len(values)

    def bytes_of(source: int, stage: int, num_bytes: float) -> float:
        return max(0, windows.get((source, stage), 0) - 1) * num_bytes

    return tuple(
        bytes_of(stage - 1, stage, values[stage])
        + (bytes_of(stage + 1, stage, gradients[stage + 1]) if stage + 1 < num_stages else 0.0)
        for stage in range(num_stages)
    )


@lru_cache(maxsize=64)
def _windows(schedule: Schedule, num_stages: int, num_micro_batches: int) -> dict[tuple[int, int], int]:
    if len(schedule.lanes(num_stages)) == num_stages:
        return {}  # a chain, which `lower` serves as it is
    return receive_windows(schedule.order(num_stages, num_micro_batches))


def _lower_channel(
    channel: Channel,
    lanes: list[_Lane],
    lane_of_stage: dict[int, _Lane],
    phase: Phase,
    window: int,
    first_at_begin: bool,
) -> None:
    """Add the messages of one channel to the lanes at both of its ends."""
    source, destination, direction = channel
    decides = destination if source < 0 else source  # in which sequence the micro-batches come
    made = lane_of_stage[decides].steps(direction, decides)
    if min(source, destination) >= 0 and lane_of_stage[source] is lane_of_stage[destination]:
        _lower_local(channel, lane_of_stage[source], made)
        return
    fifo = list(made)
    places = {m: place for place, m in enumerate(fifo)}
    if source < 0:
        for lane in lanes:
            for m, place in places.items():
                lane.first_sends.append((place, Action(source, _SEND[direction], m, destination)))
                lane.dones[lane.end].append((place, Action(source, _DONE[direction], m, destination)))
    else:
        lane = lane_of_stage[source]
        credit = max(2, _span(channel, len(lane_of_stage)) + 1)
        if phase == "train":
            credit = min(credit, _max_in_flight(lane.compute, source) + 1)
        window = max(window, _span(channel, len(lane_of_stage)) - credit + 1)
        for m, slot in made.items():
            lane.sends[slot].append(Action(source, _SEND[direction], m, destination))
        for m, slot in _done_slots(lane, channel, made, credit).items():
            lane.dones[slot].append((places[m], Action(source, _DONE[direction], m, destination)))
    receivers = [lane_of_stage[destination]] if destination >= 0 else lanes
    for lane in receivers:
        used = lane.steps(direction, destination if destination >= 0 else None)
        for m, slot in _receive_slots(fifo, used, window, first_at_begin).items():
            lane.receives[slot].append((places[m], Action(destination, _RECEIVE[direction], m, source)))
            # Output rows and input gradients are used by the caller, after the program.
            lane.waits[used[m] if destination >= 0 else lane.end].append(
                (places[m], Action(destination, _WAIT[direction], m, source))
            )


def _lower_local(channel: Channel, lane: _Lane, made: dict[int, int]) -> None:
    """Add the messages of a channel between two stages of one lane."""
    source, destination, direction = channel
    used = lane.steps(direction, destination)
    for place, (m, slot) in enumerate(made.items()):
        lane.receives[slot].append((place, Action(destination, _RECEIVE[direction], m, source)))
        lane.sends[slot].append(Action(source, _SEND[direction], m, destination))
        lane.dones[slot + 1].append((place, Action(source, _DONE[direction], m, destination)))
        lane.waits[used[m]].append((place, Action(destination, _WAIT[direction], m, source)))


def _in_sequence(parts: list[_Placed]) -> list[Action]:
    return [action for _, action in sorted(parts, key=lambda part: part[0])]


def _span(channel: Channel, num_stages: int) -> int:
    """Stages between the ends of a channel: the steps by which the slowest receiver lags behind the
    sender.
    """
    if channel.destination == OUTPUT:
        return num_stages - 1 - channel.source
    if channel.destination == INPUT:
        return channel.source
    return abs(channel.destination - channel.source)


def _done_slots(lane: _Lane, channel: Channel, made: dict[int, int], credit: int) -> dict[int, int]:
    """micro-batch -> slot before whose compute action its send must have left; see the module docstring."""
    making_slots = list(made.values())
    backward_slots = lane.steps("B", channel.source)
    slots: dict[int, int] = {}
    for index, m in enumerate(made):
        slots[m] = making_slots[index + credit] if index + credit < len(made) else lane.end
        if channel.direction == FORWARD_VALUES and m in backward_slots:
            later = [slot for slot in backward_slots.values() if slot > backward_slots[m]]
            slots[m] = min([slots[m], *later])
    return slots


def _receive_slots(
    fifo: list[int], used: dict[int, int], window: int, first_at_begin: bool
) -> dict[int, int]:
    """micro-batch -> slot in which its receive is posted: that of the use `window` uses earlier.

    The first `window` receives are posted one slot before the first use, or at the begin. Posting keeps the order of the
    channel even where the uses do not: a receive is then posted earlier.
    """
    by_use = sorted(used, key=lambda m: used[m])
    wanted: dict[int, int] = {}
    for index, m in enumerate(by_use):
        if index >= window:
            wanted[m] = used[by_use[index - window]]
        else:
            wanted[m] = 0 if first_at_begin else max(0, used[by_use[0]] - 1)
    slots: dict[int, int] = {}
    limit: int | None = None
    for m in reversed(fifo):
        slot = wanted.get(m, 0)
        limit = slot if limit is None else min(limit, slot)
        slots[m] = limit
    return {m: slots[m] for m in fifo}


def _max_in_flight(compute: Program, stage: int) -> int:
    """Most micro-batches between their forward and their backward on `stage`."""
    in_flight = peak = 0
    for action in compute:
        if action.stage == stage and action.kind is ActionKind.FORWARD:
            in_flight += 1
        elif action.stage == stage and action.kind in _MAKERS["B"]:
            in_flight -= 1
        peak = max(peak, in_flight)
    return peak


def _add_reductions(lane_of_stage: dict[int, _Lane]) -> None:
    for stage, lane in lane_of_stage.items():
        slots = [
            slot
            for slot, action in enumerate(lane.compute)
            if action.stage == stage and action.kind in _PARAMETER_GRADIENT_KINDS
        ]
        assert slots, f"stage {stage} trains but the order gives it no backward"
        lane.allows[slots[-1]].append(Action(stage, ActionKind.ALLOW_REDUCTIONS))


def _nearest_first(action: Action) -> tuple[bool, int]:
    """Neighbours wait for their values soonest, endpoints last."""
    return action.peer < 0, abs(action.peer - action.stage)
