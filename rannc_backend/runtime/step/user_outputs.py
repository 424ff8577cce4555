"""What the user gets back from a call.

In: the finished `StepState` and the scalar outputs. Out: the flat outputs in Dynamo's order: this rank's rows
of each output with a batch dimension, scalars of the global batch, values that are the same for every row,
constants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from rannc_backend.errors import OutputNotAvailableError, UserInputError
from rannc_backend.ir.action import INPUT, OUTPUT
from rannc_backend.ir.graph_input import UserInput
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.step.step_state import (
    DeliveredRows,
    NotDelivered,
    Replicated,
    RuntimeOutput,
    Scalar,
    StepState,
)
from rannc_backend.runtime.torch_internals import leaves_of
from rannc_backend.runtime.world import World


def row_gradients(
    state: StepState, grads: Sequence[torch.Tensor | None], world: World, share: float
) -> dict[str, torch.Tensor]:
    """``share`` times the gradients of this rank's rows of outputs, by value; zeros where none came."""
    begin, end = state.rows.owned_rows(OUTPUT, world.rank)
    found: dict[str, torch.Tensor] = {}
    for grad, output in zip(grads, state.shapes.outputs, strict=True):
        if isinstance(output, DeliveredRows):
            value, shape = output.value, output.shape(end - begin)
            part = (
                torch.zeros(shape, dtype=value.dtype, device=world.device) if grad is None else grad * share
            )
            found[value.name] = found[value.name] + part if value.name in found else part
    return found


def refuse_several_numbers(grads: Sequence[torch.Tensor | None], outputs: Sequence[RuntimeOutput]) -> None:
    """Gradients of outputs that are summed over the batch are one real number each.

    Raises:
        UserInputError: one has several elements, or an imaginary part.
    """
    for index, (grad, output) in enumerate(zip(grads, outputs, strict=True)):
        if grad is None or not isinstance(output, Scalar):
            continue
        place = f"output {index} of the compiled model is summed over the batch and has"
        if grad.numel() != 1:
            raise UserInputError(
                f"{place} {grad.numel()} elements; such outputs are differentiated one number at a time",
                cure="compute the loss within the model, or return the elements one by one: "
                "tuple(value.unbind()).",
            )
        if grad.is_complex():
            raise UserInputError(
                f"{place} complex numbers, which are not differentiated from outside of the model",
                cure="compute the loss within the model, or return the two parts: value.real, value.imag.",
            )


class UnavailableOutput(torch.Tensor):
    """Stands where an output would be that is left out, or that no rank can have; any use of it raises
    OutputNotAvailableError.
    """

    why: str
    is_left_out: bool

    @staticmethod
    def because(why: str, *, is_left_out: bool = False) -> UnavailableOutput:
        """One with its reason. ``is_left_out``: outputs="all" would bring it."""
        made = torch.empty(0).as_subclass(UnavailableOutput)
        made.__dict__.update(why=why, is_left_out=is_left_out)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = leaves_of((args, kwargs))
        told = (leaf.__dict__ for leaf in leaves if isinstance(leaf, UnavailableOutput))
        found: dict[str, Any] = next(told, {"why": "", "is_left_out": False})
        raise OutputNotAvailableError(
            "an output beside the loss", why=found["why"], is_left_out=found["is_left_out"]
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<output not available: {self.__dict__['why']}>"


def collect_outputs(
    outputs: Sequence[RuntimeOutput], state: StepState, scalars: Sequence[torch.Tensor], world: World
) -> list[Any]:
    """The flat outputs of this rank."""
    results: list[Any] = []
    for output in outputs:
        match output:
            case DeliveredRows():
                results.append(_no_view(_rows(output, state, world)))
            case Scalar():
                results.append(_no_view(scalars[output.index]))
            case Replicated():
                results.append(_replicated(output, state, world))
            case NotDelivered():
                results.append(UnavailableOutput.because(output.why, is_left_out=output.is_left_out))
            case _:
                results.append(output.value(state.rows.global_rows))
    state.row_outputs.clear()
    return results


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that the user may change in place: on all ranks, of which some have a slice."""
    return tensor.data if tensor._is_view() else tensor


def _rows(output: DeliveredRows, state: StepState, world: World) -> torch.Tensor:
    value = output.value
    parts = [
        state.row_outputs[value.name, m]
        for m in range(state.rows.num_micro_batches)
        if (value.name, m) in state.row_outputs
    ]
    if not parts:
        return torch.empty(output.shape(0), dtype=value.dtype, device=world.device)
    start, stop = state.rows.owned_rows(OUTPUT, world.rank)
    if len(parts) == 1:
        result = parts[0]
    else:
        result = value.from_rows(torch.cat([value.to_rows(part) for part in parts]))
    assert value.num_rows(result) == stop - start, f"rows of {value.name} are missing"
    return result


def _replicated(output: Replicated, state: StepState, world: World) -> torch.Tensor:
    tensor = state.replicated_outputs.get(output.name)
    if world.size == 1:
        assert tensor is not None, f"{output.name} was not computed"
        return tensor
    if tensor is None:
        tensor = torch.empty(output.shape, dtype=output.dtype, device=world.device)
    tensor = plain_memory(tensor)
    world.transport.broadcast(tensor, output.root, tuple(range(world.size))).wait()
    return tensor


def user_gradients(
    inputs: Sequence[UserInput], state: StepState, rank: int, scale: Number, without: Collection[str]
) -> list[torch.Tensor | None]:
    """Of the inputs that require one, this rank's rows; takes them from the step. None, as in one process, for those
    ``without`` one.
    """
    results: list[torch.Tensor | None] = []
    for spec in inputs:
        if not spec.requires_grad:
            continue
        if spec.name in without:
            results.append(None)
            continue
        parts = [
            state.user_gradients[spec.name, m]
            for m in range(state.rows.num_micro_batches)
            if (spec.name, m) in state.user_gradients
        ]
        if not parts:
            results.append(torch.zeros_like(state.inputs[spec.name]))
            continue
        start, stop = state.rows.owned_rows(INPUT, rank)
        gradient = torch.cat(parts)
        assert gradient.shape[0] == stop - start, "gradients of some rows did not come"
        results.append(gradient if isinstance(scale, float) and scale == 1.0 else gradient * scale)
    state.user_gradients.clear()
    return results
