"""Calls whose inputs have other lengths on other ranks: padded to the longest of all, where the user says with what.

In: a module and the arguments of this rank's call; option `pad_inputs`. Out: arguments of the same shapes, but for
the rows, on all ranks. What one process computes on the batch so padded is what the ranks compute together.

A loss inside the model leaves padding out, as its labels say. Code outside of the model does not know of it: what is as
long as a padded input is refused where there is no loss (`model.generate` would read the place behind a prompt's end).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rannc_backend.capture.nonstrict.arguments import FIRST, BatchDims, call_of
from rannc_backend.errors import RanksDifferError, UserInputError
from rannc_backend.runtime.step.graph_settings import LENGTHS_CURE
from rannc_backend.runtime.torch_internals import leaves_of

Shapes = dict[str, list[int]]
Exchange = Callable[[Shapes], list[Shapes]]
Check = Callable[[Any], None]


def padded_arguments(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    paddings: Mapping[str, float],
    batch_dims: BatchDims = FIRST,
    exchange: Exchange,
) -> tuple[tuple[Any, ...], dict[str, Any], Check]:
    """The arguments with the inputs that `paddings` names padded at the ends of their dimensions behind the first, and
    what is to be asked of the call's result. Collective.

    ``exchange``: gives the shapes, by input, of all ranks whose rows count.

    Raises:
        UserInputError: `paddings` names what is no input of the call.
        RanksDifferError: another input has other sizes on other ranks.
    """
    call = call_of(module, args, kwargs, batch_dims)
    if unknown := [name for name in paddings if name not in call.labels]:
        raise UserInputError(
            f"option pad_inputs names {', '.join(unknown)}, and the inputs of {type(module).__name__} are "
            f"{', '.join(call.labels)}",
            cure="name inputs as they are passed.",
        )
    own = {label: list(tensor.shape) for label, tensor in zip(call.labels, call.tensors, strict=True)}
    shapes = exchange(own)
    tensors = [
        _padded(label, tensor, [each[label] for each in shapes if label in each], paddings.get(label))
        for label, tensor in zip(call.labels, call.tensors, strict=True)
    ]
    made = [list(tensor.shape) for tensor in tensors]
    longest = {
        (dim, sizes[dim]): label
        for label, sizes in zip(call.labels, made, strict=True)
        for dim in range(1, len(sizes))
        if any(label in each and each[label][dim] != sizes[dim] for each in shapes)
    }
    args, kwargs = call.rebuilt(call.as_given(tensors))
    return args, kwargs, partial(_check_result, type(module).__name__, longest)


def _check_result(model: str, longest: Mapping[tuple[int, int], str], result: Any) -> None:
    """Refuse values of padded places that no loss has left out.

    ``longest``: the input that was padded on a rank, by dimension and size there.
    """
    if not longest:
        return
    outputs = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
    if any(output.dim() == 0 for output in outputs):
        return
    for output in outputs:
        for place in enumerate(output.shape):
            if place in longest:
                raise UserInputError(
                    f"option pad_inputs has padded {longest[place]} to {place[1]}, the length of the longest rank, and "
                    f"{model} gives values of shape {list(output.shape)} and no loss: those of padded places would be "
                    "taken for a prompt's or a row's own",
                    cure="compute the loss in the model, pad the batch yourself and read its mask, or generate by "
                    "rannc_backend.integrations.generation.generate.",
                )


def _padded(
    label: str, tensor: torch.Tensor, shapes: Sequence[Sequence[int]], value: float | None
) -> torch.Tensor:
    """A tensor of the longest of these shapes, its dimension 0 apart."""
    tails = [tuple(shape[1:]) for shape in shapes]
    if len(set(tails)) <= 1:
        return tensor
    if value is None or len({len(tail) for tail in tails}) > 1:
        raise RanksDifferError(
            f"shapes of the input {label}, behind the batch size",
            value_by_rank=[str(list(tail)) for tail in tails],
            cure=LENGTHS_CURE,
        )
    longest = [max(sizes) for sizes in zip(*tails, strict=True)]
    missing = [wanted - size for wanted, size in zip(longest, tensor.shape[1:], strict=True)]
    pairs = [edge for size in reversed(missing) for edge in (0, size)]
    return nn.functional.pad(tensor, pairs, value=value) if any(pairs) else tensor
