"""What a graph's runtime is made of, and what is kept between a forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rannc_backend.errors import BatchSizeTestError, RanksDifferError, TooFewSamplesError, UserInputError
from rannc_backend.ir.graph_input import BatchInput, ReplicatedInput, UserInput
from rannc_backend.ir.length import Length
from rannc_backend.ir.reach import Reach, Without
from rannc_backend.ir.size_test import SizeTest, first_broken
from rannc_backend.kernels.plain_memory import plain_memory, without_marks
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.step_state import StepState
from rannc_backend.runtime.step.versions import VersionCheck
from rannc_backend.runtime.world import World

LENGTHS_CURE = (
    "pad all ranks' batches to one length in the collator (transformers: DataCollatorWithPadding with "
    "padding='max_length' or pad_to_multiple_of), or let this backend do it: "
    "options={'pad_inputs': {'input_ids': 0, 'attention_mask': 0, 'labels': -100}}; where another dimension than the "
    "first counts the samples, set the option batch_dim."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """What of the configuration a step depends on. `rows_per_slice`: the fewest rows that a replica may have in a
    micro-batch.
    """

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
    reach: Reach = field(default_factory=Reach)
    rows_per_slice: int = 1

    def share(self, num_ranks: int) -> float:
        """Of a rank in the gradient of an output's rows."""
        return 1.0 / num_ranks if self.mean_gradients else 1.0


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
    only_rows: bool = False  # its last backward came to rows alone, and to no scalar
    outputs: frozenset[int] = (
        frozenset()
    )  # places of those whose gradients its last backward got, on any rank
    publishes: bool = True  # its backward is asked for gradients of parameters, and not of inputs alone


def without_gradient(world: World, label: str, settings: RuntimeSettings, step: TrainingStep) -> Without:
    """Parameters and inputs that the step's backward, which has run on all ranks, brought no gradient to. Collective."""
    reach, calls = settings.reach, step.state.calls
    if not reach.calls:
        return reach.by_graph(step.outputs)
    own = {operator: sorted(places) for operator, places in calls.reached.items()}
    shown: dict[str, frozenset[int]] = {}
    for answer in agree(world, f"gradients of {label}", [own]):
        for operator, places in answer[0].items():
            shown[operator] = shown.get(operator, frozenset()).union(places)
    return reach.without(step.outputs, shown)


def plain_inputs(
    inputs: Sequence[UserInput], user_tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The user's tensors by name, as graphs take them: those of the batch contiguous, and ``labels[:, 1:]`` is not."""
    given = zip(inputs, user_tensors, strict=True)
    tensors = {spec.name: without_marks(tensor.detach()) for spec, tensor in given}
    return tensors | {
        spec.name: plain_memory(tensors[spec.name]) for spec in inputs if isinstance(spec, BatchInput)
    }


def refuse_hooks_of_delayed(has_hooks: bool) -> None:
    """Raise UserInputError where hooks would be given a gradient that is not summed yet."""
    if has_hooks:
        raise UserInputError(
            "a parameter has hooks for its gradient, which with delay_grad_allreduce is not the gradient yet",
            cure="change p.grad after allreduce_grads, in place of the hook",
        )


def local_rows_of(inputs: Sequence[UserInput], tensors: Mapping[str, torch.Tensor]) -> int:
    """How many samples this rank has; UserInputError where its batch inputs differ in that."""
    sizes = {spec.name: tensors[spec.name].shape[0] for spec in inputs if isinstance(spec, BatchInput)}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UserInputError(
            f"inputs disagree about the number of samples ({listing})",
            cure="give every batch input the same first dimension",
        )
    return next(iter(sizes.values()))


def row_table_of(settings: RuntimeSettings, rows_by_rank: tuple[int, ...]) -> RowTable:
    """Where the rows of a step are. Raises TooFewSamplesError, BatchSizeTestError, UserInputError."""
    most_replicas = max(len(ranks) for ranks in settings.stage_ranks)
    table = RowTable(
        local_rows=rows_by_rank,
        num_micro_batches=1,
        stage_ranks=settings.stage_ranks,
        gather_inputs=settings.gather_inputs,
    )
    if table.global_rows < most_replicas:
        raise TooFewSamplesError(num_samples=table.global_rows, num_replicas=most_replicas)
    if (broken := first_broken(settings.size_tests, table.global_rows)) is not None:
        raise BatchSizeTestError(broken.text, num_rows=table.global_rows, location=broken.location)
    most = table.global_rows // (most_replicas * settings.rows_per_slice)
    if most == 0:
        raise UserInputError(
            f"batch normalization needs two values of each channel to train, and a batch of {table.global_rows} rows "
            f"has one on some of {most_replicas} replicas",
            cure="drop the last batch (drop_last=True in the DataLoader), or set the option batch_norm='global', which "
            "takes statistics over all rows.",
        )
    return replace(table, num_micro_batches=min(settings.num_micro_batches, most))


def check_replicated(inputs: Sequence[UserInput], digests_by_rank: Sequence[Sequence[float]]) -> None:
    """Raise RanksDifferError where an input without batch dimension is not the same on all ranks."""
    for index, spec in enumerate(spec for spec in inputs if isinstance(spec, ReplicatedInput)):
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
