"""Predicted time and memory of one step, from the very programs that will run.

In: the programs, seconds of each stage's computes, of each channel's messages and of the reductions. Out:
makespan, timeline, shares of busy and idle time, peak of saved activations. Compute of a lane is sequential;
messages of a channel follow each other; channels do not share bandwidth (a link used by several channels must
be priced by the caller).

Reductions run under the last backward: the gradients of a stage come in `num_buckets` equal parts at equal
distances, so the reductions of all but the last bucket can end before the backward does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rannc_backend.ir.action import Action, ActionKind, Channel, Program
from rannc_backend.schedule.edges import Phase
from rannc_backend.schedule.progress import TimedAction, run_to_end


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
