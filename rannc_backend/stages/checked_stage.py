"""Stages that are looked at while they run: the options verify_recomp, check_gradients and display_act_value.

In: compiled stages. Out: one that does the same as the first. `VerifiedStage` also runs a twin that
recomputes nothing, and logs or refuses gradients that differ; `DisplayedStage` logs the outputs of every forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rannc_backend.errors import GradientsDifferError
from rannc_backend.settings.options import Config
from rannc_backend.stages.compiled_stage import NOTHING, CompiledStage, Saved
from rannc_backend.stages.gradient_sink import GradientSink, ScratchGradients

logger = logging.getLogger(__name__)

#: Relative difference, in units of the dtype's precision, from which gradients count as different.
_TOLERANCE = 64.0


class _Place(NamedTuple):
    """Of a backward: the micro-batch, and whether the step is the first of the stage."""

    micro_batch: int
    is_first_step: bool


class DisplayedStage:
    """A stage whose forwards are logged; `describe` puts a tensor in a line."""

    def __init__(
        self, stage: CompiledStage | VerifiedStage, index: int, describe: Callable[[Tensor], str]
    ) -> None:
        logger.setLevel(logging.INFO)  # on every rank, whatever the others are silent about
        self._stage, self._index, self._describe = stage, index, describe
        self.inputs, self.outputs = stage.inputs, stage.outputs
        self.grad_outputs, self.grad_inputs, self.grad_parameters = (
            stage.grad_outputs,
            stage.grad_inputs,
            stage.grad_parameters,
        )
        self.stored_outputs, self.stored_gradients = stage.stored_outputs, stage.stored_gradients
        self.gradient_copies = stage.gradient_copies

    def forward(
        self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], Saved]:
        """As `CompiledStage.forward`."""
        outputs, saved = self._stage.forward(args, destinations)
        self._log(outputs)
        return outputs, saved

    def backward(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        sink: GradientSink,
        destinations: Mapping[int, Tensor] = NOTHING,
    ) -> list[Tensor]:
        """As `CompiledStage.backward`."""
        return self._stage.backward(saved, grads, sink, destinations)

    def backward_inputs(
        self, saved: Saved, grads: Sequence[Tensor | None], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], list[Any]]:
        """As `CompiledStage.backward_inputs`."""
        return self._stage.backward_inputs(saved, grads, destinations)

    def backward_weights(self, kept: list[Any], sink: GradientSink) -> None:
        """As `CompiledStage.backward_weights`."""
        self._stage.backward_weights(kept, sink)

    def infer(self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING) -> list[Tensor]:
        """As `CompiledStage.infer`."""
        outputs = self._stage.infer(args, destinations)
        self._log(outputs)
        return outputs

    def _log(self, outputs: Sequence[Tensor]) -> None:
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            logger.info("stage %d makes %s %s: %s", self._index, slot.kind, slot.name, self._describe(tensor))


class VerifiedStage:
    """`stage`, and `twin`, the same graph compiled to recompute nothing: backwards run on both, those of every step
    (``logs``), or of the first one alone.

    What the twin makes is compared and thrown away. Memory and time are those of both.

    Args:
        index, rank: of the stage, for people.
        step: the number of the step that runs.
        logs: differences are logged, in every step.
        refuses: a difference in the first step is a GradientsDifferError.
    """

    def __init__(
        self,
        stage: CompiledStage,
        twin: CompiledStage,
        index: int,
        *,
        rank: int = 0,
        step: Callable[[], int] = lambda: 0,
        logs: bool = True,
        refuses: bool = False,
    ) -> None:
        self._stage, self._twin, self._index, self._rank = stage, twin, index, rank
        self._step, self._logs, self._refuses = step, logs, refuses
        self._first_step: int | None = None
        self._now = (-1, 0)  # the step, and the micro-batch of the next forward
        self.inputs, self.outputs = stage.inputs, stage.outputs
        self.grad_outputs, self.grad_inputs, self.grad_parameters = (
            stage.grad_outputs,
            stage.grad_inputs,
            stage.grad_parameters,
        )
        self.stored_outputs, self.stored_gradients = stage.stored_outputs, stage.stored_gradients
        self.gradient_copies = stage.gradient_copies
        self.num_different = 0

    def forward(
        self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], Saved]:
        """As `CompiledStage.forward`. What is saved: the micro-batch, whether it is the first step, how much is the
        stage's, that, and the twin's where backward runs on both.
        """
        step = self._step()
        micro_batch = self._now[1] if step == self._now[0] else 0
        self._now = (step, micro_batch + 1)
        if self._first_step is None:
            self._first_step = step
        is_first = step == self._first_step
        outputs, saved = self._stage.forward(args, destinations)
        twin_saved = self._twin.forward(args)[1] if self._logs or is_first else ()
        return outputs, (micro_batch, is_first, len(saved), *saved, *twin_saved)

    def backward(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        sink: GradientSink,
        destinations: Mapping[int, Tensor] = NOTHING,
    ) -> list[Tensor]:
        """As `CompiledStage.backward`."""
        place, own, twins = _parts(saved)
        if not twins:
            return self._stage.backward(own, grads, sink, destinations)
        expected, made = self._twin.scratch_gradients(), self._stage.scratch_gradients()
        expected_inputs = self._twin.backward(twins, grads, expected)
        results = self._stage.backward(own, grads, made, destinations)
        self._deliver(made, expected, sink, place)
        self._compare_inputs(results, expected_inputs, place)
        return results

    def backward_inputs(
        self, saved: Saved, grads: Sequence[Tensor | None], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], list[Any]]:
        """As `CompiledStage.backward_inputs`. What is kept: the gradients of the twin, where they are, and what the stage
        keeps; or that alone.
        """
        place, own, twins = _parts(saved)
        if not twins:
            results, kept = self._stage.backward_inputs(own, grads, destinations)
            return results, [kept]
        expected = self._twin.scratch_gradients()
        expected_inputs = self._twin.backward(twins, grads, expected)
        results, kept = self._stage.backward_inputs(own, grads, destinations)
        self._compare_inputs(results, expected_inputs, place)
        return results, [expected, place, kept]

    def backward_weights(self, kept: list[Any], sink: GradientSink) -> None:
        """As `CompiledStage.backward_weights`."""
        *looked_at, own = kept
        kept.clear()
        if not looked_at:
            self._stage.backward_weights(own, sink)
            return
        expected, place = looked_at
        made = self._stage.scratch_gradients()
        self._stage.backward_weights(own, made)
        self._deliver(made, expected, sink, place)

    def _deliver(
        self, made: ScratchGradients, expected: ScratchGradients, sink: GradientSink, place: _Place
    ) -> None:
        for position, gradient in made.gradients.items():
            # As exact as the parameter's dtype: sums may have a wider one.
            dtype = self._stage.parameter_dtype(position)
            pair = (gradient.to(dtype), expected.gradients[position].to(dtype))
            self._compare(f"parameter {self.inputs[position].name}", *pair, place)
            total, holds = sink.target(position)
            total.copy_(total + gradient if holds else gradient)
            sink.made(position)

    def _compare_inputs(self, gradients: Sequence[Tensor], expected: Sequence[Tensor], place: _Place) -> None:
        for position, gradient, other in zip(self.grad_inputs, gradients, expected, strict=True):
            self._compare(f"input {self.inputs[position].name}", gradient, other, place)

    def infer(self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING) -> list[Tensor]:
        """As `CompiledStage.infer`."""
        return self._stage.infer(args, destinations)

    def _compare(self, what: str, gradient: Tensor, expected: Tensor, place: _Place) -> None:
        difference = relative_difference(gradient, expected)
        precision = torch.finfo(expected.dtype).eps
        if difference <= _TOLERANCE * precision:
            return
        self.num_different += 1
        if self._refuses and place.is_first_step:
            raise GradientsDifferError(
                what,
                rank=self._rank,
                stage=self._index,
                micro_batch=place.micro_batch,
                difference=difference,
                tolerance=_TOLERANCE * precision,
            )
        if self._logs:
            logger.warning(
                "verify_recomp: stage %d, gradient of %s: with and without recompute differ by %.3g of its "
                "norm (%s, precision %.1g)",
                self._index,
                what,
                difference,
                str(expected.dtype).removeprefix("torch."),
                precision,
            )


def _parts(saved: Saved) -> tuple[_Place, Sequence[Any], Sequence[Any]]:
    """What `VerifiedStage.forward` has saved: when, the stage's, and its twin's. A list is emptied."""
    micro_batch, is_first, number = saved[:3]
    own, twins = saved[3 : 3 + number], saved[3 + number :]
    if isinstance(saved, list):
        saved.clear()
    return _Place(micro_batch, is_first), own, twins


def watched(
    compile_with: Callable[[float], CompiledStage],
    budget: float,
    index: int,
    config: Config,
    *,
    is_trained: bool,
    rank: int,
    step: Callable[[], int],
    describe: Callable[[Tensor], str],
) -> CompiledStage | VerifiedStage | DisplayedStage:
    """A stage compiled at an activation budget, looked at while it runs if the options ask for it. Further arguments: see
    `VerifiedStage` and `DisplayedStage`.
    """
    compiled = compile_with(budget)
    stage: CompiledStage | VerifiedStage = compiled
    if (config.verify_recomp or config.check_gradients) and is_trained and budget < 1.0:
        stage = VerifiedStage(
            compiled,
            compile_with(1.0),
            index,
            rank=rank,
            step=step,
            logs=config.verify_recomp,
            refuses=config.check_gradients,
        )
    return DisplayedStage(stage, index, describe) if config.display_act_value else stage


def relative_difference(tensor: Tensor, expected: Tensor) -> float:
    """Norm of the difference as a share of the norm of `expected`; infinite where NaN or infinity is in one
    of them only.
    """
    if torch.equal(tensor, expected):
        return 0.0
    wide: Any = torch.complex128 if expected.is_complex() else torch.float64
    a, b = tensor.to(wide), expected.to(wide)
    if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()):
        a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    norm = float(b.norm())
    difference = float((a - b).norm())
    if difference != difference:
        return float("inf")
    return difference / norm if norm else difference
