"""Stages that are looked at while they run: the options verify_recomp and display_act_value.

In: compiled stages. Out: one that does the same as the first. `VerifiedStage` also runs a twin that
recomputes nothing, and logs gradients that differ; `DisplayedStage` logs the outputs of every forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rannc_backend.stages.compiled_stage import NOTHING, CompiledStage, Saved
from rannc_backend.stages.gradient_sink import GradientSink, ScratchGradients

logger = logging.getLogger(__name__)

#: Relative difference, in units of the dtype's precision, from which gradients count as different.
_TOLERANCE = 64.0


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
        self._tell(outputs)
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
        self._tell(outputs)
        return outputs

    def _tell(self, outputs: Sequence[Tensor]) -> None:
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            logger.info("stage %d makes %s %s: %s", self._index, slot.kind, slot.name, self._describe(tensor))


class VerifiedStage:
    """`stage`, and `twin`, the same graph compiled to recompute nothing: every backward runs on both.

    What the twin makes is compared and thrown away. Memory and time are those of both.
    """

    def __init__(self, stage: CompiledStage, twin: CompiledStage, index: int) -> None:
        self._stage, self._twin, self._index = stage, twin, index
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
        """As `CompiledStage.forward`. What is saved: how much of it is the stage's, that, and the twin's."""
        outputs, saved = self._stage.forward(args, destinations)
        _, twin_saved = self._twin.forward(args)
        return outputs, (len(saved), *saved, *twin_saved)

    def backward(
        self,
        saved: Saved,
        grads: Sequence[Tensor | None],
        sink: GradientSink,
        destinations: Mapping[int, Tensor] = NOTHING,
    ) -> list[Tensor]:
        """As `CompiledStage.backward`."""
        own, twins = _halves(saved)
        expected, made = self._twin.scratch_gradients(), self._stage.scratch_gradients()
        expected_inputs = self._twin.backward(twins, grads, expected)
        results = self._stage.backward(own, grads, made, destinations)
        self._deliver(made, expected, sink)
        self._compare_inputs(results, expected_inputs)
        return results

    def backward_inputs(
        self, saved: Saved, grads: Sequence[Tensor | None], destinations: Mapping[int, Tensor] = NOTHING
    ) -> tuple[list[Tensor], list[Any]]:
        """As `CompiledStage.backward_inputs`. What is kept: the gradients of the twin, and what the stage keeps."""
        own, twins = _halves(saved)
        expected = self._twin.scratch_gradients()
        expected_inputs = self._twin.backward(twins, grads, expected)
        results, kept = self._stage.backward_inputs(own, grads, destinations)
        self._compare_inputs(results, expected_inputs)
        return results, [expected, kept]

    def backward_weights(self, kept: list[Any], sink: GradientSink) -> None:
        """As `CompiledStage.backward_weights`."""
        expected, own = kept
        kept.clear()
        made = self._stage.scratch_gradients()
        self._stage.backward_weights(own, made)
        self._deliver(made, expected, sink)

    def _deliver(self, made: ScratchGradients, expected: ScratchGradients, sink: GradientSink) -> None:
        for position, gradient in made.gradients.items():
            # As exact as the parameter's dtype: sums may have a wider one.
            dtype = self._stage.parameter_dtype(position)
            pair = (gradient.to(dtype), expected.gradients[position].to(dtype))
            self._compare(f"parameter {self.inputs[position].name}", *pair)
            total, holds = sink.target(position)
            total.copy_(total + gradient if holds else gradient)
            sink.made(position)

    def _compare_inputs(self, gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for position, gradient, other in zip(self.grad_inputs, gradients, expected, strict=True):
            self._compare(f"input {self.inputs[position].name}", gradient, other)

    def infer(self, args: Sequence[Tensor], destinations: Mapping[int, Tensor] = NOTHING) -> list[Tensor]:
        """As `CompiledStage.infer`."""
        return self._stage.infer(args, destinations)

    def _compare(self, what: str, gradient: Tensor, expected: Tensor) -> None:
        difference = relative_difference(gradient, expected)
        precision = torch.finfo(expected.dtype).eps
        if difference > _TOLERANCE * precision:
            self.num_different += 1
            logger.warning(
                "verify_recomp: stage %d, gradient of %s: with and without recompute differ by %.3g of its "
                "norm (%s, precision %.1g)",
                self._index,
                what,
                difference,
                str(expected.dtype).removeprefix("torch."),
                precision,
            )


def _halves(saved: Saved) -> tuple[Sequence[Any], Sequence[Any]]:
    """What `VerifiedStage.forward` has saved: the stage's, and its twin's. A list is emptied."""
    number = saved[0]
    own, twins = saved[1 : 1 + number], saved[1 + number :]
    if isinstance(saved, list):
        saved.clear()
    return own, twins


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
