"""What ranks have recorded: one file per event and rank, in a directory that nobody else can read.

In: tensors by name, and plain facts. Out: the same, on the CPU, mapped into memory when read. Files hold
tensors and plain values only and are loaded so (`weights_only`): nothing of them is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank recorded at one place: ``facts`` are numbers, texts, lists and dicts of them."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def of(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, by the rest of the name."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class Records:
    """The events of a job in a directory."""

    directory: Path

    def write(
        self, rank: int, event: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Keep copies of tensors as they are now."""
        copies = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
        path = self._path(rank, event)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save({"tensors": copies, "facts": dict(facts or {})}, temporary)
        temporary.replace(path)

    def has(self, rank: int, event: str) -> bool:
        """Whether there is such an event."""
        return self._path(rank, event).exists()

    def read(self, rank: int, event: str) -> Event:
        """An event that is there."""
        loaded = torch.load(self._path(rank, event), map_location="cpu", weights_only=True, mmap=True)
        return Event(loaded["tensors"], loaded["facts"])

    def _path(self, rank: int, event: str) -> Path:
        return self.directory / f"rank-{rank}" / f"{event}.pt"


def call_event(call: int) -> str:
    """Inputs and outputs of a call; the first is 0."""
    return f"call-{call}"


def backward_event(call: int, number: int) -> str:
    """Incoming gradients of the outputs of a call and what ``p.grad`` is after its backward; a call may have
    several backwards.
    """
    return f"backward-{call}-{number}"


def step_event(step: int) -> str:
    """Parameters and buffers after an optimizer's step; the first is 0."""
    return f"step-{step}"


def start_event(model: int) -> str:
    """Parameters and buffers of a model before its first call."""
    return f"start-{model}"
