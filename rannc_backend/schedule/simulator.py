"""Predicted time and memory of one step, from the very programs that will run.

In: the programs, seconds of each stage's computes, of each channel's messages and of the reductions. Out:
makespan, timeline, shares of busy and idle time, peak of saved activations. Compute of a lane is sequential;
messages of a channel follow each other; channels do not share bandwidth (a link used by several channels must
be priced by the caller).

Reductions run under the last backward: the gradients of a stage come in `num_buckets` equal parts at equal
distances, so the reductions of all but the last bucket can end before the backward does.

`run_to_end` runs programs without work, to see whether they come to their end. Semantics (rendezvous): posts never block; a
message travels once its send and its receive are posted and the message before it on the channel has arrived; W and D end
when it has. An endpoint is all lanes: a message from INPUT has arrived when those of all lanes have. Reductions end only
after every lane has allowed its own and finished its computes, because a parameter may be tied between any stages. All waits
are on posts that are never taken back, so whether programs get stuck does not depend on timing, and one run with any
durations decides it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import (
    Action,
    ActionKind,
    Channel,
    Program,
)
from rannc_backend.schedule.edges import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What one micro-batch costs on a stage, in seconds, and what it keeps from F to B, in bytes."""

    forward: float
    backward: float = 0.0
    weight: float = 0.0  # of the backward, what a schedule may run later
    allreduce: float = 0.0  # of all gradients of the stage, once per step
    num_buckets: int = 1
    activation_bytes: float = 0.0
    kept_bytes: float = 0.0  # from I to W

    def __post_init__(self) -> None:
        amounts = (self.forward, self.backward, self.weight, self.backward - self.weight, self.allreduce)
        if min(amounts) < 0 or self.num_buckets < 1:
            raise ValueError(f"seconds must be >= 0 and num_buckets >= 1: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The predicted step. `busy_share` + `bubble_share` = 1: the mean over lanes of the time in computes, and
    the rest.
    """

    makespan_seconds: float
    timeline: tuple[TimedAction, ...]
    busy_share: float
    bubble_share: float
    busy_seconds: tuple[float, ...]  # by lane
    peak_activation_bytes: tuple[float, ...]  # by stage


def simulate(
    programs: Mapping[int, Program],
    stages: Sequence[StageSeconds],
    messages: Mapping[Channel, float] | None = None,
    *,
    phase: Phase = "train",
) -> SimulatedStep:
    """Run the programs in simulated time.

    Args:
        programs: per lane its program.
        stages: costs by stage.
        messages: seconds of one message by channel; a channel that is not listed costs nothing.
        phase: in "infer" nothing is kept; in "backward" all micro-batches are kept at the start.

    Raises:
        ScheduleError: the programs get stuck.
    """
    timeline = run_to_end(programs, _Costs(tuple(stages), dict(messages or {})))
    makespan = max((timed.end for timed in timeline), default=0.0)
    busy = dict.fromkeys(sorted(programs), 0.0)
    for timed in timeline:
        if timed.action.is_compute:
            busy[timed.lane] += timed.end - timed.start
    share = sum(busy.values()) / (makespan * len(busy)) if makespan else 1.0
    return SimulatedStep(
        makespan_seconds=makespan,
        timeline=timeline,
        busy_share=share,
        bubble_share=1.0 - share,
        busy_seconds=tuple(busy.values()),
        peak_activation_bytes=_peak_activation_bytes(programs, stages, phase),
    )


@dataclass(frozen=True, slots=True)
class _Costs:
    """`progress.Durations` by stage and channel."""

    stages: tuple[StageSeconds, ...]
    messages: dict[Channel, float] = field(default_factory=dict)

    def compute_seconds(self, action: Action) -> float:
        stage = self.stages[action.stage]
        if action.kind is ActionKind.FORWARD:
            return stage.forward
        if action.kind is ActionKind.BACKWARD:
            return stage.backward
        return stage.weight if action.kind is ActionKind.BACKWARD_WEIGHT else stage.backward - stage.weight

    def message_seconds(self, channel: Channel) -> float:
        return self.messages.get(channel, 0.0)

    def reduction_end(self, stage: int, last_start: float, last_end: float) -> float:
        costs = self.stages[stage]
        first_bucket = last_start + (last_end - last_start) / costs.num_buckets
        return max(first_bucket + costs.allreduce, last_end + costs.allreduce / costs.num_buckets)


def _peak_activation_bytes(
    programs: Mapping[int, Program], stages: Sequence[StageSeconds], phase: Phase
) -> tuple[float, ...]:
    held = [0.0] * len(stages)
    if phase == "infer":
        return (0.0,) * len(stages)
    if phase == "backward":
        for program in programs.values():
            for action in program:
                if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                    held[action.stage] += stages[action.stage].activation_bytes
    peaks = list(held)
    for program in programs.values():
        for action in program:
            if action.is_compute:
                stage = stages[action.stage]
                saved, kept = _SAVED_CHANGE[action.kind]
                held[action.stage] += saved * stage.activation_bytes + kept * stage.kept_bytes
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return tuple(peaks)


# Of what forwards save, and of what the first parts of backwards keep.
_SAVED_CHANGE = {
    ActionKind.FORWARD: (1, 0),
    ActionKind.BACKWARD: (-1, 0),
    ActionKind.BACKWARD_INPUT: (-1, 1),
    ActionKind.BACKWARD_WEIGHT: (0, -1),
}


class Durations(Protocol):
    """How long things take, in seconds."""

    def compute_seconds(self, action: Action) -> float:
        """Of a forward or backward."""
        ...

    def message_seconds(self, channel: Channel) -> float:
        """Of one message, from both ends posted to arrival."""
        ...

    def reduction_end(self, stage: int, last_start: float, last_end: float) -> float:
        """When the reductions of `stage` have ended, whose last backward ran from `last_start` to
        `last_end`.
        """
        ...


class NoTime:
    """Durations of zero: for asking about progress only."""

    def compute_seconds(self, action: Action) -> float:
        """0."""
        return 0.0

    def message_seconds(self, channel: Channel) -> float:
        """0."""
        return 0.0

    def reduction_end(self, stage: int, last_start: float, last_end: float) -> float:
        """`last_end`."""
        return last_end


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a lane that blocked or worked from `start` to `end` (seconds since the step began)."""

    lane: int
    action: Action
    start: float
    end: float


@dataclass(slots=True)
class _Message:
    """One message of a channel: who takes part, and how far it is. Times in seconds."""

    channel: Channel
    micro_batch: int
    senders: list[int] = field(default_factory=list)  # lanes that have its send
    receivers: list[int] = field(default_factory=list)
    sent: dict[int, float] = field(default_factory=dict)  # lane -> when it posted
    received: dict[int, float] = field(default_factory=dict)
    arrived: dict[tuple[int, int], float] = field(
        default_factory=dict
    )  # (sending lane, receiving lane) -> when

    def end_for(self, lane: int, *, is_wait: bool) -> float | None:
        """When the transfers that a W (else a D) of `lane` waits for have ended; None while one has not."""
        pairs = (
            [(other, lane) for other in self.senders]
            if is_wait
            else [(lane, other) for other in self.receivers]
        )
        if not pairs or not all(pair in self.arrived for pair in pairs):
            return None
        return max(self.arrived[pair] for pair in pairs)


@dataclass(slots=True)
class _Run:
    """State of one run."""

    programs: Mapping[int, Program]
    durations: Durations
    messages: dict[int, list[_Message | None]]  # lane -> message of each of its actions
    next_index: dict[int, int]
    clock: dict[int, float]
    num_computes_left: dict[int, int]
    channel_free: defaultdict[tuple[Channel, tuple[int, int]], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    last_compute: dict[int, tuple[float, float]] = field(default_factory=dict)  # stage -> (start, end)
    blocked: set[int] = field(default_factory=set)
    ready: deque[int] = field(default_factory=deque)
    timeline: list[TimedAction] = field(default_factory=list)

    def wake(self, lane: int) -> None:
        if lane in self.blocked:
            self.blocked.remove(lane)
            self.ready.append(lane)


def run_to_end(
    programs: Mapping[int, Program], durations: Durations | None = None
) -> tuple[TimedAction, ...]:
    """Run all programs; the timeline lists each lane's actions in its own order, by start time between lanes.

    Raises:
        ScheduleError: the programs get stuck; the action is that of a lane on the circle of waiting.
    """
    run = _Run(
        programs=programs,
        durations=durations or NoTime(),
        messages=_collect_messages(programs),
        next_index=dict.fromkeys(programs, 0),
        clock=dict.fromkeys(programs, 0.0),
        num_computes_left={lane: sum(a.is_compute for a in program) for lane, program in programs.items()},
        ready=deque(programs),
    )
    while run.ready:
        lane = run.ready.popleft()
        program, messages = programs[lane], run.messages[lane]
        for index in range(run.next_index[lane], len(program)):
            if not _step(run, lane, program[index], messages[index]):
                run.blocked.add(lane)
                break
            run.next_index[lane] = index + 1
    if run.blocked:
        raise _stuck(run)
    return tuple(sorted(run.timeline, key=lambda timed: timed.start))


def _collect_messages(programs: Mapping[int, Program]) -> dict[int, list[_Message | None]]:
    """lane -> the message of each of its actions (None for those that move none), shared between both
    ends.
    """
    messages: dict[tuple[Channel, int], _Message] = {}
    by_lane: dict[int, list[_Message | None]] = {}
    for lane, program in programs.items():
        by_lane[lane] = []
        for action in program:
            if not action.is_message:
                by_lane[lane].append(None)
                continue
            key = (action.channel, action.micro_batch)
            if key not in messages:
                messages[key] = _Message(*key)
            if action.is_send:
                messages[key].senders.append(lane)
            elif action.is_receive:
                messages[key].receivers.append(lane)
            by_lane[lane].append(messages[key])
    return by_lane


def _step(run: _Run, lane: int, action: Action, message: _Message | None) -> bool:
    """Do one action if it can end; False when it must wait for another lane."""
    start = end = run.clock[lane]
    if message is not None:
        if action.is_send or action.is_receive:
            _post(run, lane, message, is_send=action.is_send)
        else:
            arrival = message.end_for(lane, is_wait=action.is_wait)
            if arrival is None:
                return False
            end = max(start, arrival)
    elif action.is_compute:
        end = start + run.durations.compute_seconds(action)
        run.last_compute[action.stage] = (start, end)
        run.num_computes_left[lane] -= 1
        if not run.num_computes_left[lane]:
            for other in run.programs:
                run.wake(other)
    elif action.kind is ActionKind.WAIT_REDUCTIONS:
        if any(run.num_computes_left.values()):
            return False
        last_start, last_end = run.last_compute.get(action.stage, (start, start))
        end = max(start, run.durations.reduction_end(action.stage, last_start, last_end))
    run.clock[lane] = end
    run.timeline.append(TimedAction(lane, action, start, end))
    return True


def _post(run: _Run, lane: int, message: _Message, *, is_send: bool) -> None:
    """Post a send or receive; where the other end is posted too, the message gets its arrival time."""
    now = run.clock[lane]
    own, others = (message.sent, message.received) if is_send else (message.received, message.sent)
    own[lane] = now
    for other, other_time in others.items():
        pair = (lane, other) if is_send else (other, lane)
        start = max(now, other_time, run.channel_free[message.channel, pair])
        arrival = start + run.durations.message_seconds(message.channel)
        run.channel_free[message.channel, pair] = message.arrived[pair] = arrival
        run.wake(other)


def _stuck(run: _Run) -> ScheduleError:
    """Follow who waits for whom until a lane repeats or has nothing left to wait for, and tell the way."""
    lane = min(run.blocked)
    way: list[int] = []
    steps: list[str] = []
    while lane not in way:
        way.append(lane)
        index = run.next_index[lane]
        action = run.programs[lane][index]
        missing, holder = _missing(run, lane, action, run.messages[lane][index])
        steps.append(f"lane {lane} at action number {index} ({action}) waits for {missing}")
        if holder is None or holder not in run.blocked:
            break
        lane = holder
    index = run.next_index[lane]
    action = run.programs[lane][index]
    return ScheduleError(
        f"(stage {lane}, action number {index}) never ends: {'; '.join(steps)}", action=str(action)
    )


def _missing(run: _Run, lane: int, action: Action, message: _Message | None) -> tuple[str, int | None]:
    """What a blocked action waits for, and the lane that should do it (None: no lane does)."""
    if message is None:
        holder = next(other for other, left in run.num_computes_left.items() if left)
        return f"the last backward of lane {holder}", holder
    is_wait = action.is_wait
    own, others = (message.received, message.sent) if is_wait else (message.sent, message.received)
    if lane not in own:
        return f"{action.counterpart.counterpart} of lane {lane}", lane
    for other in message.senders if is_wait else message.receivers:
        if other not in others:
            return f"{action.counterpart} of lane {other}", other
    return f"{action.counterpart}, which no lane does", None
