"""What this rank did and when, in memory of bounded size: the marks between the actions of each step, and
single events beside them.

In: marks (`meter.HostClock`, `meter.DeviceClock`), begun all-reduces, steps of optimizers. Out: `Slice`s in
seconds of rank 0's clock.

Terms. A *track* is a row of the picture: step, compute, send, receive, reduction. A *slice* is a named
interval on a track. A *flight* is something under way beside the actions: a message from its post to its
wait, an all-reduce; flights of one track may overlap. An *arrow* leads from the send of a message to the wait
that receives it; each of the two ranks knows its own end. The oldest steps are forgotten when there are more
than `most_marks` marks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rannc_backend.ir.action import Action, ActionKind, Program
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.runtime.gradients.buckets import GradientBuckets, Ranks, StartReduce, Waitable
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.trace.clock_offsets import ClockOffsets
from rannc_backend.runtime.trace.meter import DeviceClock, HostClock, StepRecord
from rannc_backend.runtime.world import World
from rannc_backend.settings import hooks

MAX_MARKS = 100_000
TRACKS = ("step", "compute", "send", "receive", "reduction")
_TRACK_OF = {
    ActionKind.FORWARD: "compute",
    ActionKind.BACKWARD: "compute",
    ActionKind.BACKWARD_INPUT: "compute",
    ActionKind.BACKWARD_WEIGHT: "compute",
    ActionKind.SEND_FORWARD: "send",
    ActionKind.SEND_GRADIENT: "send",
    ActionKind.DONE_FORWARD: "send",
    ActionKind.DONE_GRADIENT: "send",
    ActionKind.RECEIVE_FORWARD: "receive",
    ActionKind.RECEIVE_GRADIENT: "receive",
    ActionKind.WAIT_FORWARD: "receive",
    ActionKind.WAIT_GRADIENT: "receive",
    ActionKind.ALLOW_REDUCTIONS: "reduction",
    ActionKind.WAIT_REDUCTIONS: "reduction",
}
# A flight begins with the end of the first kind and ends with the end of the second.
_FLIGHTS = {
    ActionKind.DONE_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.DONE_GRADIENT: ActionKind.SEND_GRADIENT,
    ActionKind.WAIT_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.WAIT_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}
_POSTS = frozenset(_FLIGHTS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """One end of a message from one rank to another, or to itself. ``message`` is the same text at both ends,
    and no other's.
    """

    message: str
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A named interval: ``begin`` and ``end`` in seconds. ``flight``: it may overlap others of its track.

    ``arrows``: those that begin with the slice, or that end with it.
    """

    name: str
    track: str
    begin: float
    end: float
    step: int
    micro_batch: int = -1
    flight: bool = False
    arrows: tuple[Arrow, ...] = ()


@dataclass(slots=True)
class _TracedStep:
    number: int
    name: str
    record: StepRecord
    rows: RowTable
    place: int  # among the steps of all models, the same on all ranks


@dataclass(slots=True)
class _Single:
    """An event outside of programs; ``end`` is None while it lasts."""

    name: str
    track: str
    step: int
    begin: Any
    end: Any = None
    flight: bool = False


@dataclass(slots=True, kw_only=True)
class EventTrace:
    """The trace of one rank. ``file``: where all ranks' events go in the end."""

    world: World
    file: str
    most_marks: int = MAX_MARKS
    offsets: ClockOffsets = field(default_factory=ClockOffsets)
    num_forgotten: int = 0
    label: str = ""  # what this rank does, for its heading
    _clock: HostClock | DeviceClock = field(init=False)
    _steps: deque[_TracedStep] = field(default_factory=deque)
    _singles: deque[_Single] = field(default_factory=deque)
    _num_marks: int = 0
    _num_steps: int = 0
    _anchor: tuple[Any, float] | None = None  # a mark, and this host's clock at it
    _hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clock = DeviceClock() if self.world.device.type == "cuda" else HostClock()

    def begin(self, record: StepRecord | None, number: int, name: str, rows: RowTable) -> StepRecord:
        """A step begins, on all ranks: its record, a new one where the meter has none. Collective."""
        self._forget()
        self._num_steps += 1
        # At step 1, 2, 4, ... and then regularly: clocks drift.
        if self.world.size > 1 and (
            self._num_steps & (self._num_steps - 1) == 0 or self._num_steps % 256 == 0
        ):
            self.offsets.measure(self.world)
        if record is None:
            record = StepRecord(
                num_rows=rows.global_rows, num_micro_batches=rows.num_micro_batches, mark=self._clock.mark
            )
            record.start()
        if self._anchor is None:
            self._anchor = self._clock.anchor()
            self.watch_optimizers()
        self._steps.append(_TracedStep(number, name, record, rows, self._num_steps))
        return record

    def _forget(self) -> None:
        """Count the step before, and drop the oldest while there are too many marks."""
        if self._steps:
            self._num_marks += _num_marks(self._steps[-1].record)
        while self._num_marks > self.most_marks and len(self._steps) > 1:
            num_gone = _num_marks(self._steps.popleft().record)
            self._num_marks -= num_gone
            self.num_forgotten += num_gone
        while len(self._singles) > self.most_marks:
            self._singles.popleft()
            self.num_forgotten += 1

    def follow(self, buckets: GradientBuckets, *, stages: Sequence[int]) -> None:
        """Note the all-reduces of a graph that has been deployed."""
        self.label = self.label or (lane_text(stages) if stages else "no stage")
        buckets.start_reduce = self._traced(buckets.start_reduce)

    def _traced(self, start_reduce: StartReduce) -> StartReduce:
        def start(buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> Waitable:
            name = f"all-reduce of {buffer.nbytes / 2**20:.3g} MB over {len(ranks)} ranks"
            single = self._note(name, "reduction", flight=True)
            return _TracedWork(start_reduce(buffer, ranks, takers), single, self._clock)

        return start

    def watch_optimizers(self) -> None:
        """Note every step of any torch.optim optimizer, from now until `close`."""
        if self._hooks:
            return
        under_way: list[_Single] = []

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            under_way.append(self._note(f"optimizer step ({type(optimizer).__name__})", "compute"))

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if under_way:
                under_way.pop().end = self._clock.mark()

        self._hooks += [
            hooks.register("event trace", register_optimizer_step_pre_hook, before),
            hooks.register("event trace", register_optimizer_step_post_hook, after),
        ]

    def close(self) -> None:
        """Remove the hooks. What has been noted stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, name: str, track: str, *, flight: bool = False) -> _Single:
        step = self._steps[-1].number if self._steps else 0
        single = _Single(name, track, step, self._clock.mark(), flight=flight)
        self._singles.append(single)
        return single

    def slices(self) -> Iterator[Slice]:
        """Everything that is remembered and over, each track in the order in which it happened. Times are
        this rank's.
        """
        if self._anchor is None:
            return
        seconds = _Seconds(self._clock, *self._anchor)
        singles = deque(single for single in self._singles if single.end is not None)
        for step in list(self._steps):
            while singles and singles[0].step < step.number:
                yield _single_slice(singles.popleft(), seconds)
            seconds.move_on(step.record.spans[0][0])
            yield from _step_slices(step, seconds, self.world.rank)
        for single in singles:
            yield _single_slice(single, seconds)


class _TracedWork:
    def __init__(self, work: Waitable, single: _Single, clock: HostClock | DeviceClock) -> None:
        self._work, self._single, self._clock = work, single, clock

    def wait(self, *arguments: Any) -> None:
        self._work.wait(*arguments)
        self._single.end = self._clock.mark()


class _Seconds:
    """Marks as seconds of this host's clock: marks of a device by their distance from an earlier one whose
    time is known.
    """

    def __init__(self, clock: HostClock | DeviceClock, mark: Any, seconds: float) -> None:
        self._clock, self._base, self._base_seconds = clock, mark, seconds

    def of(self, mark: Any) -> float:
        """Seconds of a mark near the base."""
        return mark if isinstance(mark, float) else self._base_seconds + self._clock.seconds(self._base, mark)

    def move_on(self, mark: Any) -> None:
        """Count from ``mark`` from now on: distances between device marks are exact only over short times."""
        self._base, self._base_seconds = mark, self.of(mark)


def _num_marks(record: StepRecord) -> int:
    return sum(len(marks) for _, marks in record.programs)


def _single_slice(single: _Single, seconds: _Seconds) -> Slice:
    return Slice(
        name=single.name,
        track=single.track,
        begin=seconds.of(single.begin),
        end=seconds.of(single.end),
        step=single.step,
        flight=single.flight,
    )


def _step_slices(step: _TracedStep, seconds: _Seconds, rank: int) -> Iterator[Slice]:
    programs = [
        (program, [seconds.of(mark) for mark in list(marks)]) for program, marks in list(step.record.programs)
    ]
    last = max((times[-1] for _, times in programs if times), default=0.0)
    for span in step.record.spans:
        begin = seconds.of(span[0])
        # A step that failed, or that has no backward, has no end of its own.
        end = seconds.of(span[1]) if len(span) > 1 else max(begin, last)
        yield Slice(name=f"{step.name} {step.number}", track="step", begin=begin, end=end, step=step.number)
    arrows = _Arrows(step, rank)
    for program, times in programs:
        yield from _program_slices(program, times, step.number, arrows)


class _Arrows:
    """Names the messages of one step's actions, as both ends do."""

    def __init__(self, step: _TracedStep, rank: int) -> None:
        self._step, self._rank = step, rank
        self._seen: Counter[str] = Counter()  # a step that runs again sends again

    def of(self, action: Action) -> tuple[Arrow, ...]:
        """One for each rank that the action sends to, or has received from: none where it has no rows."""
        begins = action.is_send
        if not begins and not action.is_wait:
            return ()
        found = []
        for piece in self._step.rows.pieces(action.stage, action.peer, self._rank, action.micro_batch):
            ends = (self._rank, piece.peer) if begins else (piece.peer, self._rank)
            name = f"step {self._step.place}, {action.channel}, micro-batch {action.micro_batch}, rank {ends[0]} to {ends[1]}"
            key = f"{'to' if begins else 'from'} {name}"
            found.append(Arrow(message=f"{name}, run {self._seen[key]}", begins=begins))
            self._seen[key] += 1
        return tuple(found)


def _program_slices(
    program: Program, times: Sequence[float], number: int, arrows: _Arrows
) -> Iterator[Slice]:
    posted: dict[tuple[ActionKind, str, int], float] = {}
    for action, begin, end in zip(program, times, times[1:], strict=False):
        track = _TRACK_OF.get(action.kind, "compute")
        yield Slice(
            name=str(action),
            track=track,
            begin=begin,
            end=end,
            step=number,
            micro_batch=action.micro_batch,
            arrows=arrows.of(action),
        )
        if action.kind in _POSTS:
            posted[action.kind, str(action.channel), action.micro_batch] = end
        elif action.kind in _FLIGHTS:
            start = posted.pop((_FLIGHTS[action.kind], str(action.channel), action.micro_batch), end)
            yield Slice(
                name=f"{action.channel} micro-batch {action.micro_batch} under way",
                track=_TRACK_OF[action.kind],
                begin=start,
                end=end,
                step=number,
                micro_batch=action.micro_batch,
                flight=True,
            )
