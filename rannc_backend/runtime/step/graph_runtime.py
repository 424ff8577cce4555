"""One captured graph at run time: a call on all ranks, from this rank's inputs to its outputs, and the
backward that belongs to it.

In: this rank's user tensors, or the gradients of the outputs. Out: this rank's rows and the scalars of the
global batch; gradients published in ``p.grad``.

Terms. *Eager backward* (1F1B): one program runs forwards and backwards during the forward call, with the
gradient of the first differentiable scalar (the *loss*) as given; backward only scales what is there. The
loss gradient is the one that came last time, since nobody knows this step's yet. *Deferred backward*
(fill-drain): forwards run in the forward call, backwards in the backward call. A graph is switched to
deferred backward for good the first time that something other than the loss receives a gradient; that step is
run again. A graph of *narrow range* computes in float16 somewhere: what overflows and what vanishes there
depends on the loss gradient, so scaling afterwards cannot make up for a wrong one, and the step is run again
with the right one (a GradScaler changes its scale rarely).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from rannc_backend.ir.action import GraphUse, OrderedMessage, Program, describe
from rannc_backend.ir.graph_input import ReplicatedInput, UserInput
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.ir.reach import OperatorCalls, Without
from rannc_backend.kernels.kept_rows import with_real_rows
from rannc_backend.runtime.agreement import Digests, agree, exchanging
from rannc_backend.runtime.gradients.buckets import GradientBuckets
from rannc_backend.runtime.gradients.loss_gradients import Number, if_within, means_on_device, ratio
from rannc_backend.runtime.host_resources import give_back_memory, keep_freed_memory
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.shared_buffers import SharedBuffers
from rannc_backend.runtime.step.compile_watch import CompileWatch
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.graph_settings import (
    RuntimeSettings,
    StepCounter,
    TrainingStep,
    agreed_lengths,
    check_replicated,
    local_rows_of,
    plain_inputs,
    refuse_hooks_of_delayed,
    row_table_of,
    without_gradient,
)
from rannc_backend.runtime.step.queue_order import queued_messages
from rannc_backend.runtime.step.rehearsal import Rehearsal, same_random_numbers
from rannc_backend.runtime.step.scalars import ScalarGraphs, total_over_ranks
from rannc_backend.runtime.step.step_state import RuntimeOutput, Scalar, StepShapes, StepState
from rannc_backend.runtime.step.user_outputs import (
    collect_outputs,
    refuse_several_numbers,
    row_gradients,
    user_gradients,
)
from rannc_backend.runtime.step.versions import VersionCheck, refuse_changes, refuse_other_gradients
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import without_anomaly_detection, without_autocast
from rannc_backend.runtime.trace.copy_report import CopyLog
from rannc_backend.runtime.trace.event_trace import EventTrace
from rannc_backend.runtime.trace.meter import StepMeter
from rannc_backend.runtime.world import QueuedMessage, World

logger = logging.getLogger(__name__)

# A loss gradient within these bounds costs no digits in float32 or bfloat16.
_MIN_LOSS_GRADIENT, _MAX_LOSS_GRADIENT = 2.0**-24, 2.0**24
_MAX_QUEUES = 32  # of steps with other rows; those of a training are few


@dataclass(slots=True, kw_only=True)
class GraphRuntime:
    """See the module docstring. ``make_executor(use, rows, lengths)`` compiles for one use;
    ``shapes_at(lengths, training)`` gives what depends on lengths."""

    label: str
    world: World
    settings: RuntimeSettings
    counter: StepCounter
    inputs: tuple[UserInput, ...]
    outputs: tuple[RuntimeOutput, ...]
    scalars: ScalarGraphs
    buckets: GradientBuckets
    shared_buffers: SharedBuffers
    make_executor: Callable[[GraphUse, RowTable, tuple[int, ...]], Executor]
    shapes_at: Callable[[tuple[int, ...], bool], StepShapes]
    make_program: Callable[[GraphUse, str, int], tuple[Program, tuple[OrderedMessage, ...]]]
    loss_index: int | None
    is_random: bool
    noting_calls: Callable[[OperatorCalls], AbstractContextManager[None]]
    switches: Switches = field(default_factory=Switches)
    copies: CopyLog | None = None
    meter: StepMeter | None = None
    trace: EventTrace | None = None
    rehearsal: Rehearsal | None = None
    _executors: dict[GraphUse, Executor] = field(default_factory=dict)
    _programs: dict[
        tuple[GraphUse, str, int], tuple[Program, tuple[str, ...], tuple[OrderedMessage, ...]]
    ] = field(default_factory=dict)
    _queues: dict[tuple[GraphUse, str, RowTable], tuple[QueuedMessage, ...]] = field(default_factory=dict)
    _deferred: bool = False
    _rows: RowTable | None = None
    _digests: Digests = field(default_factory=Digests)

    def message_tensors(self) -> list[torch.Tensor]:
        """Buffers of messages that stay from step to step."""
        return [tensor for executor in self._executors.values() for tensor in executor.send_buffers.tensors]

    @without_autocast
    def begin(self, user_tensors: Sequence[torch.Tensor], *, training: bool) -> StepState:
        """Agree with the other ranks on this step's rows and random seed; nothing is computed yet.

        ``user_tensors``: by ``inputs``.
        """
        if self.switches.observer is not None:
            self.switches.observer.begun(self, user_tensors)
        tensors = plain_inputs(self.inputs, user_tensors)
        local_rows = local_rows_of(self.inputs, tensors)
        pairs = zip(self.inputs, user_tensors, strict=True)
        digests = [
            self._digests.of(spec.name, tensor) for spec, tensor in pairs if isinstance(spec, ReplicatedInput)
        ]
        # Drawn on every rank, so that the generators of all ranks stay alike; rank 0's counts.
        rng_seed = int(torch.empty((), dtype=torch.int64).random_().item()) if self.is_random else 0
        name = "training step" if training else "inference step"
        delayed = training and self.switches.delay_reductions
        refuse_hooks_of_delayed(delayed and self.buckets.has_hooks())
        name += " with delay_grad_allreduce" * delayed
        lengths = [tensors[length.carrier].shape[length.dim] for length in self.settings.lengths]
        outside = self.buckets.outside_changes(self.counter.number + 1)
        answers = self._agree_with_measured(
            f"{name} of {self.label}", [local_rows, rng_seed, digests, lengths, outside]
        )
        check_replicated(self.inputs, [answer[2] for answer in answers])
        self.buckets.check_outside_changes(self.settings.stage_ranks, [answer[4] for answer in answers])
        rows_by_rank = tuple(answer[0] for answer in answers)
        rows = self._row_table(rows_by_rank)
        agreed = agreed_lengths(self.settings, rows, [answer[3] for answer in answers])
        shapes = self.shapes_at(agreed, training)
        record = None
        if training and self.meter is not None:
            record = self.meter.begin(rows.global_rows, rows.num_micro_batches, tensors.values())
        device = self.world.device
        scalars: dict[str, Any] = {
            # Not torch.tensor: that copies from the host, and a copy waits for the device.
            "rng_seed": torch.full((), answers[0][1], dtype=torch.int64, device=device),
            "global_rows": torch.full((), rows.global_rows, dtype=torch.int64, device=device),
            **{length.name: n for length, n in zip(self.settings.lengths, shapes.lengths, strict=True)},
        }
        counts = local_rows > 0 and (self.settings.gather_inputs or self.world.rank == 0)
        with exchanging(self.world):
            scalars.update(
                shapes.scalars.prologue_totals(
                    tensors | scalars if counts else None, self._all_reduce(), device
                )
            )
        self.counter.number += 1
        if self.counter.number == 1 and self.world.rank == 0 and self.world.device_problem:
            logger.warning("%s", self.world.device_problem)
        if self.trace is not None:
            record = self.trace.begin(record, self.counter.number, name, rows)
        state = StepState(
            number=self.counter.number,
            rows=rows,
            shapes=shapes,
            inputs=tensors,
            scalars=scalars,
            training=training,
            record=record,
        )
        if self.copies is None or self.copies.own is not None:
            state.copies = None
        return state

    def _agree_with_measured(self, what: str, payload: list[Any]) -> list[Any]:
        """`agree`, which also carries what was measured when that is due: at the same time on all ranks."""
        measured = self.meter.measured() if self.meter is not None else None
        answers = agree(self.world, what, [*payload, measured])
        if self.meter is not None and measured is not None:
            self.meter.deliver([answer[-1] for answer in answers])
        return answers

    def _row_table(self, rows_by_rank: tuple[int, ...]) -> RowTable:
        table = row_table_of(self.settings, rows_by_rank)
        if table != self._rows:
            self._rows = table  # the last one remembers what messages have asked it
        return self._rows

    def _all_reduce(self) -> Callable[[torch.Tensor], None] | None:
        if self.world.size == 1:
            return None
        everyone = tuple(range(self.world.size))
        limit = self.settings.step_limit_seconds
        return lambda tensor: self.world.transport.allreduce(tensor, everyone).wait(limit)

    def executor(self, use: GraphUse, state: StepState) -> Executor:
        """The compiled part of this rank, made at first use with the sizes of the step that begins as examples;
        all ranks wait for the slowest. The step is rehearsed first where that is needed.
        """
        rehearsal, rows, lengths = None, state.rows, state.shapes.lengths
        if self.rehearsal is not None and self.rehearsal.is_needed(use, rows, lengths):
            rehearsal = self.rehearsal
        if use not in self._executors or rehearsal is not None:
            own = [i for i, ranks in enumerate(self.settings.stage_ranks) if self.world.rank in ranks]
            part = lane_text(own) if own else "nothing"
            with CompileWatch(self.world, f"{part} of {self.label} ({use})") as watch:
                if use not in self._executors:
                    make = without_anomaly_detection(self.make_executor)
                    self._executors[use] = make(use, rows, lengths)
                if rehearsal is not None:
                    without_anomaly_detection(self._rehearse)(rehearsal, use, state)
                watch.done()
                agree(
                    self.world,
                    f"compilation of {self.label}",
                    limit_seconds=self.settings.compile_limit_seconds,
                )
            if rehearsal is not None:
                rehearsal.done(use, rows, lengths)
            if self.world.device.type == "cpu":
                give_back_memory()  # of compilers, and of parameters that have moved
                keep_freed_memory()
        return self._executors[use]

    def _rehearse(self, rehearsal: Rehearsal, use: GraphUse, state: StepState) -> None:
        programs = [
            (phase, *self._program(use, phase, state.rows.num_micro_batches)[:2]) for phase in use.phases
        ]
        ones = [1.0] * self._num_scalars
        rehearsal.run(
            use,
            self._executors[use],
            programs,
            state,
            self.buckets.pending,
            lambda: state.shapes.scalars.partial_gradients(state.scalars, ones, self.world.device),
        )
        if state.record is not None:
            state.record.spoiled = True

    def _program(
        self, use: GraphUse, phase: str, num_micro_batches: int
    ) -> tuple[Program, tuple[str, ...], tuple[OrderedMessage, ...]]:
        key = (use, phase, num_micro_batches)
        if key not in self._programs:
            program, ordered = self.make_program(*key)
            self._programs[key] = (program, describe(program), ordered)
        return self._programs[key]

    def _run(self, use: GraphUse, phase: str, state: StepState) -> None:
        executor = self.executor(use, state)
        program, phases, ordered = self._program(use, phase, state.rows.num_micro_batches)
        key = (use, phase, state.rows)
        if key not in self._queues:
            if len(self._queues) >= _MAX_QUEUES:
                self._queues.clear()
            self._queues[key] = queued_messages(ordered, self.world.rank, state.rows)
        self.world.monitor.phase(f"step {state.number}, {phase}")
        with exchanging(self.world), with_real_rows(), self.noting_calls(state.calls):
            executor.run(program, phases, state, self._queues[key])

    @without_autocast
    def infer(self, user_tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Outputs of the global batch's forward, this rank's rows of it."""
        state = self.begin(user_tensors, training=False)
        self._run(GraphUse.INFER, "infer", state)
        return self._outputs(state)

    @without_autocast
    def forward(self, state: StepState) -> tuple[list[Any], TrainingStep]:
        """Outputs of a training step; with eager backward, its gradients are made too."""
        eager = self.uses_eager_backward
        if eager:
            self._run_eager(state, self.counter.loss_gradient)
        else:
            self._run(GraphUse.ALL, "forward", state)
        outputs = self._outputs(state)
        if state.record is not None:
            state.record.stop(complete=eager)
        # What an eager backward is made of has been used by now; saved values of a deferred one may share
        # memory with outputs.
        shared = (
            ()
            if eager
            else [value for spec, value in zip(self.outputs, outputs, strict=True) if spec.differentiable]
        )
        # Buffers matter to a step that is run again, which an eager backward alone may be.
        buffers = state.buffers_read if eager else {}
        return outputs, TrainingStep(
            state, eager, VersionCheck.of(state.inputs, self.buckets.parameters, shared, buffers)
        )

    def _run_eager(self, state: StepState, loss_gradient: Number) -> None:
        self.executor(GraphUse.LOSS, state)  # a rehearsal uses the buffers that this step takes then
        self._begin_backward(state, frozenset({self.loss_index}))
        state.loss_gradient = loss_gradient
        loss: list[Number] = [0.0] * self._num_scalars
        loss[self._loss_scalar] = loss_gradient
        state.partial_gradients = state.shapes.scalars.partial_gradients(
            state.scalars, loss, self.world.device
        )
        self._run(GraphUse.LOSS, "train", state)

    def _begin_backward(self, state: StepState, outputs: frozenset[Any]) -> None:
        """Make place for what gradients of ``outputs`` come to."""
        state.pending = self.buckets.pending()
        state.calls = OperatorCalls(self.settings.reach.absent_results(outputs))

    @property
    def uses_eager_backward(self) -> bool:
        """True while the backward runs within the forward call."""
        return (
            self.settings.eager_backward
            and self.loss_index is not None
            and self.scalars.linear
            and not self._deferred
        )

    @property
    def _num_scalars(self) -> int:
        return sum(isinstance(output, Scalar) for output in self.outputs)

    @property
    def _loss_scalar(self) -> int:
        assert self.loss_index is not None, "no scalar output needs a gradient"
        loss = self.outputs[self.loss_index]
        assert isinstance(loss, Scalar), "a loss is a scalar"
        return loss.index

    def _outputs(self, state: StepState) -> list[Any]:
        with exchanging(self.world):
            self.shared_buffers.share()
            totals = total_over_ranks(
                state.partials, state.shapes.scalars.partials, self._all_reduce(), self.world.device
            )
            state.scalars.update(totals)
            scalars = state.shapes.scalars.scalars(state.scalars)
            return collect_outputs(state.shapes.outputs, state, scalars, self.world)

    @without_autocast
    def backward(
        self, step: TrainingStep, grads: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Publish gradients; returns the gradients of the inputs that require them, in order of ``inputs``.

        ``grads``: of every output, None where none came. ``keep``: the graph is retained for another
        backward.

        Raises:
            UserInputError: what backward needs was modified in place since the forward.
        """
        refuse_several_numbers(grads, self.outputs)
        self.world.counts.num_backwards += step.publishes
        scalars = [
            grad if isinstance(output, Scalar) else None
            for grad, output in zip(grads, self.outputs, strict=True)
        ]
        behind = self.world.runs_behind
        grad_outputs = [] if behind else [0.0 if grad is None else float(grad) for grad in scalars]
        words = [[grad is not None for grad in grads], grad_outputs, step.versions.changed(), step.publishes]
        answers = self._agree_with_measured(f"backward of {self.label}", words)
        step.changed_by_rank = tuple(answer[2] for answer in answers)
        refuse_other_gradients([answer[3] for answer in answers])
        if not step.eager:
            refuse_changes(step.changed_by_rank)
        size = len(answers)
        step.outputs = frozenset(i for i in range(len(grads)) if any(answer[0][i] for answer in answers))
        if behind:
            with exchanging(self.world):
                means = means_on_device(scalars, self._all_reduce(), size, self.world.device)
        else:
            means = [sum(answer[1][i] for answer in answers) / size for i in range(len(grads))]
        if step.eager and step.outputs <= {self.loss_index}:
            assert self.loss_index is not None, "there is a loss where a step is eager"
            gradients = self._publish_eager(step, means[self.loss_index], keep=keep)
        else:
            if step.eager:
                self._deferred = True
                step.state, step.eager = self._again(step), False
                self._run(GraphUse.ALL, "forward", step.state)
            step.only_rows = not any(isinstance(self.outputs[place], Scalar) for place in step.outputs)
            gradients = self._run_deferred(step, grads, means, keep=keep)
        if self.copies is not None and step.state.copies is not None:
            self.copies.take(step.state.copies, step.state.rows.num_micro_batches)
        if self.switches.observer is not None and step.publishes:
            self.switches.observer.published(self)
        return gradients

    def _publish_eager(
        self, step: TrainingStep, gradient: Number, *, keep: bool
    ) -> list[torch.Tensor | None]:
        if self.settings.narrow_range:
            # Whether to run again is decided on the host, which waits for the device here; a GradScaler does
            # so in its step anyway.
            gradient = float(gradient)
        if not isinstance(gradient, torch.Tensor) and self._needs_another_loss_gradient(
            gradient, step.state.loss_gradient
        ):
            step.state = self._again(step)
            self._run_eager(step.state, gradient)
        scale = ratio(gradient, step.state.loss_gradient)
        self._remember_loss_gradient(gradient)
        without = self._publish(step, scale, keep=keep)
        return user_gradients(self.inputs, step.state, self.world.rank, scale, without.inputs)

    def _publish(self, step: TrainingStep, scale: Number, *, keep: bool) -> Without:
        """The step's gradients, which have been made; what has none."""
        state = step.state
        assert state.pending is not None, "a backward without gradient buffers"
        without = without_gradient(self.world, self.label, self.settings, step)
        if step.publishes:
            self.buckets.publish(state.pending, scale, keep=keep, without=without.parameters)
        if not keep:
            state.pending = None
        return without

    def _needs_another_loss_gradient(self, gradient: float, expected: Number) -> bool:
        return bool(gradient != expected) and (self.settings.narrow_range or not math.isfinite(gradient))

    def _remember_loss_gradient(self, gradient: Number) -> None:
        bounds = (0.0, math.inf) if self.settings.narrow_range else (_MIN_LOSS_GRADIENT, _MAX_LOSS_GRADIENT)
        self.counter.loss_gradient = if_within(gradient, *bounds, otherwise=self.counter.loss_gradient)

    def _again(self, step: TrainingStep) -> StepState:
        """The step before its forward, to be run once more; it reads the buffers that were read, and does not
        advance them again.
        """
        refuse_changes(step.changed_by_rank)
        if step.state.record is not None:
            step.state.record.spoiled = True
        return step.state.before_forward()

    def _run_deferred(
        self,
        step: TrainingStep,
        grads: Sequence[torch.Tensor | None],
        means: Sequence[Number],
        *,
        keep: bool,
    ) -> list[torch.Tensor | None]:
        state = step.state
        state.keep_saved = keep
        if state.record is not None and state.record.complete:
            state.record = None  # a second backward of the same forward
        if state.record is not None:
            state.record.start()
        self._run_backward(state, grads, means, step.outputs)
        without = self._publish(step, 1.0, keep=False)
        if state.record is not None:
            state.record.stop(complete=True)
        scale = 1.0 / self.settings.share(self.world.size) if step.only_rows else 1.0
        return user_gradients(self.inputs, state, self.world.rank, scale, without.inputs)

    def _run_backward(
        self,
        state: StepState,
        grads: Sequence[torch.Tensor | None],
        means: Sequence[Number],
        outputs: frozenset[Any],
    ) -> None:
        """Backwards from the gradients of ``outputs``, and of scalars their ``means``; nothing is published."""
        self._begin_backward(state, outputs)
        scalar_grad_outputs: list[Number] = [0.0] * self._num_scalars
        for output, mean in zip(self.outputs, means, strict=True):
            if isinstance(output, Scalar):
                scalar_grad_outputs[output.index] = mean
        state.partial_gradients = state.shapes.scalars.partial_gradients(
            state.scalars, scalar_grad_outputs, self.world.device
        )
        state.grad_outputs = row_gradients(state, grads, self.world, self.settings.share(self.world.size))
        self._run(GraphUse.ALL, "backward", state)

    @without_autocast
    @torch.no_grad()
    def trial(self, user_tensors: Sequence[torch.Tensor]) -> float:
        """Seconds of a step's forward and backward, of which nothing is left: gradients are reduced and dropped, buffers
        stay, nothing is counted, and no random generator advances. Collective; for graphs with a loss.
        """
        before, eager = self.counter.number, self.uses_eager_backward
        with same_random_numbers(self.world.device):
            state = self.begin(user_tensors, training=True)
            self.counter.number, state.apply_buffer_updates = before, False
            self.executor(GraphUse.LOSS if eager else GraphUse.ALL, state)  # compiles
            begun = time.perf_counter()
            self._run_eager(state, 1.0) if eager else self._run(GraphUse.ALL, "forward", state)
            self._outputs(state)
            if not eager:
                means = [float(index == self.loss_index) for index in range(len(self.outputs))]
                self._run_backward(state, [None] * len(means), means, frozenset({self.loss_index}))
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)
        return time.perf_counter() - begun
