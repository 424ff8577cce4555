"""What a graph's runtime is made of, and what is kept between a forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rannc_backend.errors import RanksDifferError, UserInputError
from rannc_backend.ir.length import Length
from rannc_backend.ir.size_test import SizeTest
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.step_state import StepState
from rannc_backend.runtime.step.versions import VersionCheck

LENGTHS_CURE = (
    "pad all ranks' batches to one length in the collator (transformers: DataCollatorWithPadding with "
    "padding='max_length' or pad_to_multiple_of), or let this backend do it: "
    "options={'pad_inputs': {'input_ids': 0, 'attention_mask': 0, 'labels': -100}}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInput:
    """A user tensor of the graph: its placeholder name, and "batch" or "replicated"."""

    name: str
    kind: str
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """What of the configuration a step depends on."""

    stage_ranks: tuple[tuple[int, ...], ...]
    num_micro_batches: int
    eager_backward: bool
    narrow_range: bool
    gather_inputs: bool
    mean_gradients: bool
    step_limit_seconds: float
    compile_limit_seconds: float
    size_tests: tuple[SizeTest, ...] = ()
    lengths: tuple[Length, ...] = ()


@dataclass(slots=True)
class StepCounter:
    """Number of steps begun by a model, over all its graphs; and the loss gradient of the next eager
    backward.
    """

    number: int = 0
    loss_gradient: Number = 1.0


@dataclass(slots=True)
class TrainingStep:
    """A forward whose backward may come: its state, whether its gradients exist already, and what must not
    change until then.

    With eager backward a change matters only if the step has to be run again.
    """

    state: StepState
    eager: bool
    versions: VersionCheck
    changed_by_rank: tuple[str, ...] = ()


def local_rows_of(inputs: Sequence[RuntimeInput], tensors: Mapping[str, torch.Tensor]) -> int:
    """How many samples this rank has; UserInputError where its batch inputs differ in that."""
    sizes = {spec.name: tensors[spec.name].shape[0] for spec in inputs if spec.kind == "batch"}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UserInputError(
            f"inputs disagree about the number of samples ({listing})",
            cure="give every batch input the same first dimension",
        )
    return next(iter(sizes.values()))


def check_replicated(inputs: Sequence[RuntimeInput], digests_by_rank: Sequence[Sequence[float]]) -> None:
    """Raise RanksDifferError where an input without batch dimension is not the same on all ranks."""
    for index, spec in enumerate(spec for spec in inputs if spec.kind == "replicated"):
        values = [repr(digests[index]) for digests in digests_by_rank]
        if len(set(values)) > 1:
            raise RanksDifferError(
                f"values of the input {spec.name}, which has no batch dimension", value_by_rank=values
            )


def agreed_lengths(
    settings: RuntimeSettings, rows: RowTable, lengths_by_rank: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The lengths of a step, which all ranks have whose rows count.

    Raises:
        RanksDifferError: they do not.
    """
    counting = [
        rank
        for rank in range(len(lengths_by_rank))
        if rows.local_rows[rank] and (settings.gather_inputs or rank == 0)
    ]
    for index, length in enumerate(settings.lengths):
        values = [lengths[index] for lengths in lengths_by_rank]
        if len({values[rank] for rank in counting}) > 1:
            raise RanksDifferError(
                f"dimension {length.dim} of the input {length.carrier}",
                value_by_rank=[str(value) for value in values],
                cure=LENGTHS_CURE,
            )
    return tuple(lengths_by_rank[counting[0]])
