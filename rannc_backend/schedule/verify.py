"""Static check of the programs of all lanes before the first step.

In: the programs, the edge table, the phase. Out: the peaks of each stage (micro-batches with saved values,
receive and send buffers), or a ScheduleError that names the lane, the number and the text of the action at
fault.

What is checked:
- completeness: every action that the edges and the phase call for is there exactly once, nothing else is;
- order inside a lane: forward before backward, values waited for before use, sent after they are made,
  reductions allowed right before the last backward (earlier would reduce unfinished gradients) and waited for
  after it;
- channels: both ends name the micro-batches in one order, for every pair of lanes;
- progress: all lanes reach their ends when messages travel only once both ends have posted them (rendezvous);
- buffers: every saved value, receive buffer and send buffer is taken once and freed once, and no more than
  the stated bounds exist at a time.

A receive buffer is taken by R and freed by the compute action that uses it (or given to the caller, at an
endpoint); a send buffer is taken by S and freed by D; saved values are taken by F and freed by B. Where an order
splits backwards, I is in the place of B; what it keeps is freed by W, which stands behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import (
    FORWARD_VALUES,
    GRADIENTS,
    Action,
    ActionKind,
    Channel,
    Program,
)
from rannc_backend.schedule.description import Lanes, one_stage_each
from rannc_backend.schedule.edges import EdgeSpec, Phase, active_channels, is_training
from rannc_backend.schedule.simulator import run_to_end


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeaks:
    """The most that a stage holds at a time. Bytes are per row of a micro-batch (of this rank's rows of
    it).
    """

    num_in_flight: int
    num_kept: int  # micro-batches between their I and their W
    num_receive_buffers: int
    num_send_buffers: int
    receive_bytes_per_row: float
    send_bytes_per_row: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What a program must contain and in which order, derived from the edge table alone."""

    lanes: Lanes
    expected: dict[
        int, dict[Action, tuple[Action, ...]]
    ]  # lane -> action -> what must come before it in the lane
    num_micro_batches: int
    phase: Phase
    max_in_flight: Sequence[int]
    max_kept: Sequence[int]
    max_receive_buffers: int
    bytes_per_row: dict[Channel, float]


def verify(
    programs: Mapping[int, Program],
    edges: Iterable[EdgeSpec],
    num_micro_batches: int,
    phase: Phase,
    *,
    max_in_flight: Sequence[int] | None = None,
    max_kept: Sequence[int] | None = None,
    window: int | None = None,
    lanes: Lanes | None = None,
) -> dict[int, StagePeaks]:
    """Check the programs of one call.

    Args:
        programs: per lane its program.
        edges: the edge table that the programs were lowered from.
        num_micro_batches: micro-batches of the call.
        phase: what the call does.
        max_in_flight: per stage the bound of the schedule (`orders.in_flight_bounds`); default: all
        micro-batches.
        max_kept: the same of micro-batches between the two parts of their backwards.
        window: how many micro-batches ahead receives may be posted; default: one, and where lanes have several stages
        as many as there are.
        lanes: the stages of each; default: lane s runs stage s.

    Returns:
        The peaks by stage.

    Raises:
        ScheduleError: the programs could hang, mix up messages, lose a result or hold more than the bounds
        allow.
    """
    edges = tuple(edges)
    if sorted(programs) != list(range(len(programs))):
        raise ScheduleError(f"lanes must be numbered 0 to {len(programs) - 1}, got {sorted(programs)}")
    split = {
        action.stage
        for program in programs.values()
        for action in program
        if action.kind is ActionKind.BACKWARD_INPUT
    }
    lanes = lanes or one_stage_each(len(programs))
    num_stages = sum(map(len, lanes))
    if len(lanes) != len(programs):
        raise ScheduleError(f"there are {len(programs)} programs for {len(lanes)} lanes")
    if window is None:
        window = 1 if len(lanes) == num_stages else num_micro_batches
    rules = _Rules(
        lanes=lanes,
        expected=_expected_actions(lanes, edges, num_micro_batches, phase, split),
        num_micro_batches=num_micro_batches,
        phase=phase,
        max_in_flight=max_in_flight or [num_micro_batches] * num_stages,
        max_kept=max_kept or [num_micro_batches] * num_stages,
        max_receive_buffers=max(window, num_stages) + 1,
        bytes_per_row=_bytes_per_row(edges),
    )
    peaks: dict[int, StagePeaks] = {}
    for lane in programs:
        peaks |= _check_lane(lane, programs[lane], rules)
    _check_channels(programs)
    run_to_end(programs)
    return peaks


def _expected_actions(
    lanes: Lanes,
    edges: Sequence[EdgeSpec],
    num_micro_batches: int,
    phase: Phase,
    split: Collection[int],
) -> dict[int, dict[Action, tuple[Action, ...]]]:
    """lane -> every action it must contain -> the actions that must come before it. `split`: stages whose backwards
    have two parts.
    """

    def maker(stage: int, direction: str) -> ActionKind:
        if direction == FORWARD_VALUES:
            return ActionKind.FORWARD
        return ActionKind.BACKWARD_INPUT if stage in split else ActionKind.BACKWARD

    expected: dict[int, dict[Action, tuple[Action, ...]]] = {lane: {} for lane in range(len(lanes))}
    lane_of = {stage: lane for lane, stages in enumerate(lanes) for stage in stages}
    incoming: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for channel in active_channels(edges, phase):
        source, destination, direction = channel
        for place in (source, destination):
            if place >= 0 and place not in lane_of:
                raise ScheduleError(
                    f"channel {channel} names stage {place}, but there are {len(lane_of)} stages"
                )
        incoming[destination, direction].append(source)
        kinds = [ActionKind(letter + direction) for letter in "SRWD"]
        for m in range(num_micro_batches):
            send = Action(source, kinds[0], m, destination)
            receive = Action(destination, kinds[1], m, source)
            made_by = (Action(source, maker(source, direction), m),) if source >= 0 else ()
            for lane in [lane_of[source]] if source >= 0 else expected:
                expected[lane][send] = made_by
                expected[lane][Action(source, kinds[3], m, destination)] = (send,)
            for lane in [lane_of[destination]] if destination >= 0 else expected:
                expected[lane][receive] = ()
                expected[lane][Action(destination, kinds[2], m, source)] = (receive,)
    for stage, lane in lane_of.items():
        actions = expected[lane]
        for m in range(num_micro_batches):
            forward = Action(stage, ActionKind.FORWARD, m)
            if phase != "backward":
                actions[forward] = tuple(
                    Action(stage, ActionKind.WAIT_FORWARD, m, source) for source in incoming[stage, "F"]
                )
            if is_training(phase):
                waits = [
                    Action(stage, ActionKind.WAIT_GRADIENT, m, source) for source in incoming[stage, "B"]
                ]
                backward = Action(stage, maker(stage, GRADIENTS), m)
                actions[backward] = (*waits, *([forward] if phase == "train" else []))
                if stage in split:
                    actions[Action(stage, ActionKind.BACKWARD_WEIGHT, m)] = (backward,)
        if is_training(phase):
            begin_last_micro_batch = Action(stage, ActionKind.ALLOW_REDUCTIONS)
            actions[begin_last_micro_batch] = ()
            actions[Action(stage, ActionKind.WAIT_REDUCTIONS)] = (begin_last_micro_batch,)
    return expected


def _check_lane(lane: int, program: Program, rules: _Rules) -> dict[int, StagePeaks]:
    """Completeness, order and buffers of one lane; the peaks of its stages."""
    expected = rules.expected[lane]
    seen: set[Action] = set()
    backwards: Counter[int] = Counter()  # by stage
    for index, action in enumerate(program):
        before = expected.get(action)
        if before is None:
            raise _error(lane, index, action, f"does not belong into lane {lane} in phase {rules.phase!r}")
        if action in seen:
            raise _error(lane, index, action, "is there twice")
        for needed in before:
            if needed not in seen:
                raise _error(lane, index, action, f"comes before {needed}")
        if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            backwards[action.stage] += 1
        elif (
            action.kind is ActionKind.ALLOW_REDUCTIONS
            and backwards[action.stage] != rules.num_micro_batches - 1
        ):
            problem = f"must stand before the last backward, not after {backwards[action.stage]} of them"
            raise _error(lane, index, action, problem)
        elif action.kind is ActionKind.WAIT_REDUCTIONS and backwards[action.stage] != rules.num_micro_batches:
            problem = f"must come after all backwards, not after {backwards[action.stage]} of them"
            raise _error(lane, index, action, problem)
        seen.add(action)
    missing = sorted(expected.keys() - seen)
    if missing:
        raise _error(lane, len(program), missing[0], f"is missing, as are {len(missing) - 1} others")
    return {stage: _check_buffers(lane, stage, program, rules) for stage in rules.lanes[lane]}


class _Buffers:
    """What a stage of a lane holds while the program runs, and the most it ever held."""

    def __init__(self, lane: int, stage: int, rules: _Rules) -> None:
        self.rules, self.own = rules, frozenset(rules.lanes[lane])
        self.in_flight = self.peak_in_flight = rules.num_micro_batches if rules.phase == "backward" else 0
        self.kept = self.peak_kept = 0
        self.receiving: Counter[Channel] = Counter()
        self.sending: Counter[Channel] = Counter()
        self.peak_buffers = {"receive": 0, "send": 0}
        self.peak_bytes = {"receive": 0.0, "send": 0.0}
        self.max_in_flight, self.max_kept = rules.max_in_flight[stage], rules.max_kept[stage]
        num_stages = sum(map(len, rules.lanes))
        # In "train" send buffers fall with the saved values; elsewhere a message may span all lanes.
        self.max_sends = self.max_in_flight + 1 if rules.phase == "train" else max(2, num_stages + 1)
        self.arrivals = {
            action.channel
            for action in rules.expected[lane]
            if action.is_receive and action.stage == stage and action.peer not in self.own
        }

    def follow(self, action: Action) -> str:
        """Do what `action` does to buffers; what is wrong with it, or an empty text."""
        if action.is_compute:
            return self._compute(action)
        if action.peer in self.own:
            return ""  # nothing is copied between stages of the same ranks
        if action.is_receive:
            return self._take("receive", self.receiving, action.channel, self.rules.max_receive_buffers)
        if action.is_send:
            return self._take("send", self.sending, action.channel, self.max_sends)
        if action.is_done:
            self.sending[action.channel] -= 1
        return ""

    def _compute(self, action: Action) -> str:
        is_forward = action.kind is ActionKind.FORWARD
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            self.kept -= 1
            return ""
        if action.kind is ActionKind.BACKWARD_INPUT:
            self.kept += 1
            self.peak_kept = max(self.peak_kept, self.kept)
            if self.kept > self.max_kept:
                return f"keeps {self.kept} micro-batches for their second part, the bound is {self.max_kept}"
        for channel in self.arrivals:
            if (channel.direction == FORWARD_VALUES) == is_forward:
                self.receiving[channel] -= 1
        if not is_forward:
            self.in_flight -= 1
        elif self.rules.phase != "infer":
            self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        if self.in_flight > self.max_in_flight:
            return f"brings {self.in_flight} micro-batches in flight, the bound is {self.max_in_flight}"
        return ""

    def _take(self, name: str, held: Counter[Channel], channel: Channel, bound: int) -> str:
        held[channel] += 1
        self.peak_buffers[name] = max(self.peak_buffers[name], sum(held.values()))
        num_bytes = float(sum(count * self.rules.bytes_per_row[each] for each, count in held.items()))
        self.peak_bytes[name] = max(self.peak_bytes[name], num_bytes)
        if held[channel] > bound:
            return f"takes {name} buffer number {held[channel]} of channel {channel}, the bound is {bound}"
        return ""

    def leaks(self) -> list[str]:
        """What is still held at the end and should not be."""
        kept = self.rules.num_micro_batches if self.rules.phase == "forward" else 0
        buffers = [
            f"{n} of {channel}" for held in (self.receiving, self.sending) for channel, n in held.items() if n
        ]
        saved = [] if self.in_flight == kept else [f"{self.in_flight} saved micro-batches"]
        return buffers + saved + ([f"{self.kept} without their W"] if self.kept else [])


def _check_buffers(lane: int, stage: int, program: Program, rules: _Rules) -> StagePeaks:
    """Follow what a stage of this lane holds through its (complete, ordered) program."""
    buffers = _Buffers(lane, stage, rules)
    for index, action in enumerate(program):
        if action.stage != stage:
            continue  # of another stage, or rows that belong to the caller
        problem = buffers.follow(action)
        if problem:
            raise _error(lane, index, action, problem)
    leaks = buffers.leaks()
    assert not leaks, f"lane {lane} is complete and in order, yet ends with {leaks}"
    return StagePeaks(
        num_in_flight=buffers.peak_in_flight,
        num_kept=buffers.peak_kept,
        num_receive_buffers=buffers.peak_buffers["receive"],
        num_send_buffers=buffers.peak_buffers["send"],
        receive_bytes_per_row=buffers.peak_bytes["receive"],
        send_bytes_per_row=buffers.peak_bytes["send"],
    )


def _check_channels(programs: Mapping[int, Program]) -> None:
    """Both ends of each channel, in every pair of lanes, must name the micro-batches in one order."""
    posts: defaultdict[tuple[Channel, bool], dict[int, list[tuple[int, Action]]]] = defaultdict(dict)
    for lane, program in programs.items():
        for index, action in enumerate(program):
            if action.is_send or action.is_receive:
                key = (action.channel, action.is_send)
                posts[key].setdefault(lane, []).append((index, action))
    for (channel, is_send), senders in posts.items():
        if not is_send:
            continue
        for sender, sends in senders.items():
            for receiver, receives in posts[channel, False].items():
                for (_, send), (index, receive) in zip(sends, receives, strict=True):
                    if send.micro_batch != receive.micro_batch:
                        problem = f"would get the message of {send}, which lane {sender} sends at that place"
                        raise _error(receiver, index, receive, problem)


def _bytes_per_row(edges: Iterable[EdgeSpec]) -> dict[Channel, float]:
    table: dict[Channel, float] = {}
    for edge in edges:
        table[Channel(edge.src, edge.dst, "F")] = edge.forward_bytes_per_row
        table[Channel(edge.dst, edge.src, "B")] = edge.gradient_bytes_per_row
    return table


def _error(lane: int, index: int, action: Action, problem: str) -> ScheduleError:
    return ScheduleError(f"(stage {lane}, action number {index}) {problem}", action=str(action))
