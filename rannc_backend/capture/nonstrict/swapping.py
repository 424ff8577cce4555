"""Other tensors in all places where the modules of a model hold theirs, for a while.

In: a module and which tensor takes whose place. Out: a stretch in which they are there, after which all is as
before; and what the code that ran meanwhile has put in their places itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError

_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """An entry of a dictionary or a list."""

    holder: Any
    key: Any
    name: str
    is_buffer: bool

    def get(self) -> Any:
        """What is there; None if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return None


@dataclass(frozen=True, slots=True)
class Replaced:
    """A place in which the code has put something else."""

    slot: Slot
    before: torch.Tensor  # that was put in there for the stretch
    now: Any


@dataclass(frozen=True, slots=True)
class Swap:
    """The places, with what was put there."""

    placed: tuple[tuple[Slot, torch.Tensor], ...]

    def replaced(self) -> list[Replaced]:
        """To be asked within the stretch: places whose tensor is not there any more."""
        return [
            Replaced(slot, tensor, slot.get()) for slot, tensor in self.placed if slot.get() is not tensor
        ]


@contextmanager
def swapped(module: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[Swap]:
    """`others`: by the id of the tensor that is there."""
    slots = [slot for slot in _slots(module) if id(slot.get()) in others]
    before = [slot.get() for slot in slots]
    placed = tuple((slot, others[id(tensor)]) for slot, tensor in zip(slots, before, strict=True))
    try:
        for slot, tensor in placed:
            slot.holder[slot.key] = tensor
        yield Swap(placed)
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.holder[slot.key] = tensor


def _slots(module: nn.Module) -> Iterator[Slot]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for holder, is_buffer in ((part._parameters, False), (part._buffers, True)):
            for key in holder:
                yield Slot(holder, key, f"{prefix}{key}", is_buffer)
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                yield from _inside(vars(part), key, value, f"{prefix}{key}", _MAX_DEPTH)


def _inside(holder: Any, key: Any, value: object, name: str, depth: int) -> Iterator[Slot]:
    if isinstance(value, torch.Tensor):
        yield Slot(holder, key, name, is_buffer=False)
    elif depth and isinstance(value, list | dict):
        for inner_key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(value, inner_key, inner, f"{name}[{inner_key!r}]", depth - 1)


def write_back(replaced: Sequence[Replaced]) -> None:
    """A buffer that the forward has replaced by another tensor gets its values; nothing else may be."""
    for entry in replaced:
        now, before = entry.now, entry.before
        if (
            entry.slot.is_buffer
            and isinstance(now, torch.Tensor)
            and (now.shape, now.dtype) == (before.shape, before.dtype)
        ):
            with torch.no_grad():
                before.copy_(now)
            continue
        raise UnsupportedModelError(
            f"the forward puts another value in place of {entry.slot.name}",
            cure="change the values of a buffer (self.name.copy_(new)), and keep its shape.",
        )
