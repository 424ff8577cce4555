"""Finds tensors that were changed in place between a forward and its backward.

In: the tensors that saved values may share memory with. Out: torch's kind of error instead of wrong
gradients. Saved values live outside autograd, so autograd's own check does not see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rannc_backend.errors import UserInputError


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """Tensors by name with the version that they had in the forward."""

    entries: tuple[tuple[str, torch.Tensor, int], ...]

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        buffers: Mapping[tuple[str, int], torch.Tensor],
    ) -> VersionCheck:
        """Versions of the step's inputs, this rank's parameters, the outputs given to the user and the
        buffers that were read.
        """
        tensors = [(f"input {name}", tensor) for name, tensor in inputs.items()]
        tensors += [(f"parameter {name}", tensor) for name, tensor in parameters.items()]
        tensors += [("an output", output.detach()) for output in outputs]
        tensors += [
            (f"buffer {name}", tensor) for (name, micro_batch), tensor in buffers.items() if micro_batch == 0
        ]
        return cls(tuple((name, tensor, tensor._version) for name, tensor in tensors))

    def changed(self) -> str:
        """Name of one of them that was modified since; "" if none was."""
        return next((name for name, tensor, version in self.entries if tensor._version != version), "")


def refuse_other_gradients(publishes_by_rank: Sequence[bool]) -> None:
    """Raise UserInputError where some ranks want gradients of inputs alone, and others those of parameters."""
    if len(set(publishes_by_rank)) > 1:
        rank = publishes_by_rank.index(False)
        raise UserInputError(
            f"rank {rank} asks for gradients of inputs alone (torch.autograd.grad, backward(inputs=...)), and rank "
            f"{publishes_by_rank.index(True)} for those of parameters, in the same backward",
            cure="let all ranks call the same of the two.",
        )


def refuse_changes(changed_by_rank: Sequence[str]) -> None:
    """Raise UserInputError where a rank has modified one of its tensors; ``changed_by_rank``: what
    `VersionCheck.changed` gave each.
    """
    rank, name = next(((rank, name) for rank, name in enumerate(changed_by_rank) if name), (0, ""))
    if name:
        where = f" on rank {rank}" if len(changed_by_rank) > 1 else ""
        raise UserInputError(
            f"{name} was modified in place{where} between the forward and its backward, which still needs it",
            cure="call backward before the modification, or modify a clone",
        )
