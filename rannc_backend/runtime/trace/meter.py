"""What some training steps of a model took on this rank, measured beside them.

In: marks between the actions of a step, the tensors that are always there. Out: a `measured` record per rank
(JSON-able), which travels with the agreement that all ranks hold anyway at the next begin of a step or
backward: no collective of its own, so nothing to hang on.

Terms. Steps 1 and 2 *warm up* (compilation, first allocations). On the CPU the next one is the *memory step*:
its allocations are followed operator by operator, which takes time, so it is not timed. CUDA's allocator
counts by itself. Then `num_steps` steps are *timed*. A step counts when its gradients were made in the usual
way: not those without a backward, nor those that ran again. Every decision depends on numbers that are equal
on all ranks: steps begun and completed, rows, micro-batches.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rannc_backend.ir.action import ActionKind, Program
from rannc_backend.runtime.trace.allocations import AllocationTracker, optimizer_tensors, unique_bytes
from rannc_backend.settings import hooks

NUM_WARM_UP_STEPS = 2

_KINDS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward",
    ActionKind.BACKWARD_WEIGHT: "backward",
    ActionKind.WAIT_FORWARD: "waiting",
    ActionKind.WAIT_GRADIENT: "waiting",
    ActionKind.DONE_FORWARD: "waiting",
    ActionKind.DONE_GRADIENT: "waiting",
    ActionKind.SEND_FORWARD: "sending",
    ActionKind.SEND_GRADIENT: "sending",
    ActionKind.RECEIVE_FORWARD: "sending",
    ActionKind.RECEIVE_GRADIENT: "sending",
    ActionKind.WAIT_REDUCTIONS: "reducing",
}
_PER_MICRO_BATCH = ("forward", "backward")
_PER_STEP = ("waiting", "sending", "reducing")


class HostClock:
    """Marks are seconds."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def anchor(self) -> tuple[float, float]:
        """A mark and the host's seconds at it."""
        now = self.mark()
        return now, now


class DeviceClock:
    """Marks are events in the current CUDA stream; they are read long after the step, so the host never waits
    within one.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def anchor(self) -> tuple[torch.cuda.Event, float]:
        """A mark and the host's seconds at it: waits for the device."""
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter()


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. `mark` is called before the first and after each action; `tracker` is there in the memory
    step only.
    """

    num_rows: int
    num_micro_batches: int
    mark: Callable[[], Any]
    tracker: AllocationTracker | None = None
    programs: list[tuple[Program, list[Any]]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    complete: bool = False
    spoiled: bool = False

    def marks_of(self, program: Program) -> list[Any]:
        """A new list of marks for one run of a program."""
        marks: list[Any] = []
        self.programs.append((program, marks))
        return marks

    def start(self) -> None:
        """The backend begins to work, with all ranks there."""
        self.spans.append([self.mark()])

    def stop(self, *, complete: bool) -> None:
        """The backend has done this part of the step; ``complete``: its gradients are made."""
        self.spans[-1].append(self.mark())
        self.complete = self.complete or complete

    def following(self) -> contextlib.AbstractContextManager[Any]:
        """Around a run of a program: follows allocations in the memory step."""
        return self.tracker.following() if self.tracker is not None else contextlib.nullcontext()


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """Measures the first training steps of one graph.

    Args:
        stages: those of this rank.
        offloads: parameters, gradients and optimizer state are on the host; of the device's memory only buffers are
            there when a step begins.
        expected_rows: rows of the steps that are worth most: those that the plan was made for.
        model_tensors: parameters and buffers of the model, whatever of them this rank has.
        gradient_tensors: gives the buffers of gradients.
        message_tensors: gives the buffers of messages that stay from step to step.
        deliver: called once on every rank with the records of all ranks, by rank.
    """

    device: torch.device
    stages: tuple[int, ...]
    num_steps: int
    expected_rows: int
    model_tensors: Sequence[torch.Tensor]
    gradient_tensors: Callable[[], Iterable[torch.Tensor]]
    message_tensors: Callable[[], Iterable[torch.Tensor]]
    offloads: bool = False
    deliver: Callable[[list[dict[str, Any]]], None]
    _clock: HostClock | DeviceClock = field(init=False)
    _num_begun: int = 0
    _records: list[StepRecord] = field(default_factory=list)
    _memory: StepRecord | None = None
    _message_bytes: int = 0  # when the memory step began
    _told: bool = False
    _optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    _hook: Any = None

    def __post_init__(self) -> None:
        self._clock = DeviceClock() if self.device.type == "cuda" else HostClock()
        optimizers = self._optimizers

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            optimizers.add(optimizer)

        if self.device.type != "cuda":
            self._hook = hooks.register("step meter", register_optimizer_step_post_hook, stepped)

    @property
    def _memory_steps(self) -> int:
        return 0 if self.device.type == "cuda" else 1

    @property
    def _last(self) -> int:
        return NUM_WARM_UP_STEPS + self._memory_steps + self.num_steps

    def begin(
        self, num_rows: int, num_micro_batches: int, inputs: Iterable[torch.Tensor]
    ) -> StepRecord | None:
        """Count one more training step, which begins now; its record, None where it is not measured."""
        self._num_begun += 1
        place = self._num_begun - NUM_WARM_UP_STEPS
        if place < 1 or self._num_begun > self._last:
            return None
        record = StepRecord(num_rows=num_rows, num_micro_batches=num_micro_batches, mark=self._clock.mark)
        if place <= self._memory_steps:
            record.tracker = AllocationTracker([*self.model_tensors, *self.gradient_tensors(), *inputs])
            self._memory, self._message_bytes = record, unique_bytes(self.message_tensors())
        else:
            if place == 1:
                torch.cuda.reset_peak_memory_stats(self.device)
            self._records.append(record)
        record.start()
        return record

    def measured(self) -> dict[str, Any] | None:
        """This rank's record, once, when all steps are measured; else None. All ranks get theirs at the same
        call. {}: nothing to tell.
        """
        if self._told or self._num_begun < self._last:
            return None
        if self._num_begun == self._last and not self._records[-1].complete:
            return None
        self._told = True
        if self._hook is not None:
            self._hook.remove()
        timed = self._comparable()
        result = self._summary(timed) if timed else {}
        # Marks, weak references and the model's tensors have served.
        self._records.clear()
        self._memory = None
        self.model_tensors, self.gradient_tensors, self.message_tensors = (), tuple, tuple
        return result

    def _comparable(self) -> list[StepRecord]:
        """Complete steps of one size: the plan's, else the most frequent one."""
        complete = [record for record in self._records if record.complete and not record.spoiled]
        sizes = Counter((record.num_rows, record.num_micro_batches) for record in complete)
        if not sizes:
            return []
        chosen = max(sizes, key=lambda size: (size[0] == self.expected_rows, sizes[size], size))
        return [record for record in complete if (record.num_rows, record.num_micro_batches) == chosen]

    def _summary(self, timed: Sequence[StepRecord]) -> dict[str, Any]:
        by_micro_batch: dict[tuple[int, str], list[float]] = {
            (stage, kind): [] for stage in self.stages for kind in _PER_MICRO_BATCH
        }
        by_step: dict[str, list[float]] = {kind: [] for kind in (*_PER_STEP, "step")}
        for record in timed:
            sums = dict.fromkeys(_PER_STEP, 0.0)
            # By stage, kind and micro-batch: a backward may have two parts.
            computes: defaultdict[tuple[int, str, int], float] = defaultdict(float)
            for program, marks in record.programs:
                for action, begin, end in zip(program, marks, marks[1:], strict=False):
                    kind = _KINDS.get(action.kind)
                    if kind in sums:
                        sums[kind] += self._clock.seconds(begin, end)
                    elif kind is not None:
                        computes[action.stage, kind, action.micro_batch] += self._clock.seconds(begin, end)
            for (stage, kind, _), seconds in computes.items():
                by_micro_batch[stage, kind].append(seconds)
            for kind, seconds in sums.items():
                by_step[kind].append(seconds)
            by_step["step"].append(sum(self._clock.seconds(*span) for span in record.spans if len(span) > 1))
        return {
            "stages": {
                str(stage): {
                    f"{kind}_seconds": _median(by_micro_batch[stage, kind]) for kind in _PER_MICRO_BATCH
                }
                for stage in self.stages
            },
            "num_rows": timed[0].num_rows,
            "num_micro_batches": timed[0].num_micro_batches,
            "num_steps": len(timed),
            **{f"{kind}_seconds": _median(values) for kind, values in by_step.items()},
            **self._memory_bytes(),
        }

    def _memory_bytes(self) -> dict[str, int]:
        if self.device.type == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(self.device)}
        on_host = self.offloads
        kept = [each for each in self.model_tensors if not (on_host and isinstance(each, torch.nn.Parameter))]
        weights = unique_bytes(kept)
        gradients = 0 if on_host else unique_bytes(self.gradient_tensors())
        state = optimizer_tensors(self._optimizers, self.model_tensors)
        optimizer = 0 if on_host else unique_bytes(state)
        memory = self._memory
        followed = 0 if memory is None or memory.tracker is None else memory.tracker.peak_bytes
        return {
            "weight_bytes": weights,
            "gradient_bytes": gradients,
            "optimizer_bytes": optimizer,
            "message_bytes": self._message_bytes,
            "step_bytes": followed,
            "peak_bytes": weights + gradients + optimizer + self._message_bytes + followed,
        }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
