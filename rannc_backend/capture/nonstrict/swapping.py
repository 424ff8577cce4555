"""Other tensors in all places where the modules of a model hold theirs, for a while.

In: a module and which tensor takes whose place. Out: a stretch in which they are there, after which all is as
before; and what the code that ran meanwhile has put in their places itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

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


def write_back(replaced: Sequence[Replaced], results: Iterable[object]) -> None:
    """A buffer that the forward has replaced by another tensor gets its values; so does a parameter whose old and
    new tensor have no part in the gradients of `results`. Nothing else may be replaced.

    A parameter without a gradient is one that no optimizer changes, so that it does not matter which of the two
    tensors the optimizer knows.
    """
    for entry in replaced:
        now, before = entry.now, entry.before
        is_new_value = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (
            before.shape,
            before.dtype,
        )
        if is_new_value and not entry.slot.is_buffer and _reach(results, (before, now)):
            raise UnsupportedModelError(
                f"the forward puts a new parameter in place of {entry.slot.name}, which is trained: the optimizer "
                "would go on with the old one",
                cure="change its values under torch.no_grad() (self.name.copy_(new)), or use it detached.",
            )
        if not is_new_value:
            raise UnsupportedModelError(
                f"the forward puts another value in place of {entry.slot.name}",
                cure="change the values of a buffer (self.name.copy_(new)), and keep its shape.",
            )
        with torch.no_grad():
            before.copy_(now)


def _reach(results: Iterable[object], leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the gradient of any of the results goes to any of the leaves."""
    nodes = {get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad}
    tensors = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    to_visit = [get_gradient_edge(tensor).node for tensor in tensors]
    seen = set(to_visit)
    while to_visit:
        node = to_visit.pop()
        if node in nodes:
            return True
        found = {previous for previous, _ in node.next_functions if previous is not None} - seen
        seen |= found
        to_visit += found
    return False
