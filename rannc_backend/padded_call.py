"""Calls whose inputs have other lengths on other ranks: padded to the longest of all, where the user says with what.

In: a module and the arguments of this rank's call; option `pad_inputs`. Out: arguments of the same shapes, but for
the rows, on all ranks. What one process computes on the batch so padded is what the ranks compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.errors import RanksDifferError, UserInputError
from rannc_backend.runtime.step.graph_settings import LENGTHS_CURE

Shapes = dict[str, list[int]]
Exchange = Callable[[Shapes], list[Shapes]]


def padded_arguments(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    paddings: Mapping[str, float],
    exchange: Exchange,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the inputs that `paddings` names padded at the ends of their dimensions behind the first.
    Collective.

    ``exchange``: gives the shapes, by input, of all ranks whose rows count.

    Raises:
        UserInputError: `paddings` names what is no input of the call.
        RanksDifferError: another input has other sizes on other ranks.
    """
    call = call_of(module, args, kwargs)
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
    return call.rebuilt(tensors)


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
