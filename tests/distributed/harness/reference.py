"""One process, eager, on the global batch: what every distributed run must equal.

In: a case. Out: `Reference`: per step the loss, outputs and gradients, and the parameters and buffers after
the last.
Terms: *slices* are the row intervals that are computed together when statistics of the batch matter
(BatchNorm by its
rule: one micro-batch on one replica; running statistics advance once per micro-batch).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.harness.case import Case
from tests.distributed.harness.compare import torch_dtype
from tests.model_entry import Batch, Entry

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the reference: losses per rank (equal when the loss is inside), rows and scalars by
    name.
    """

    losses: tuple[Tensor, ...]
    rows: dict[str, Tensor]
    scalars: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """All steps, and the state afterwards (state_dict names)."""

    steps: tuple[Step, ...]
    state: dict[str, Tensor]


def even_sizes(total: int, num_parts: int) -> list[int]:
    """Sizes of num_parts consecutive parts, the first ones larger by one where it does not divide."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]


def intervals(sizes: list[int] | tuple[int, ...], start: int = 0) -> list[tuple[int, int]]:
    """Consecutive (start, stop) of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=start))
    return list(zip(ends, ends[1:]))


def make_optimizer(entry: Entry, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all equality cases."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=entry.adam_epsilon)


def batch_of_step(entry: Entry, case: Case, step: int) -> Batch:
    """The global batch of one step; the same on all ranks."""
    return entry.batch(sum(case.local_rows), 1000 * case.seed + step + 1, torch_dtype(case.dtype))


def statistics_slices(case: Case) -> list[tuple[int, int]]:
    """Rows that one micro-batch on one replica holds, for plans in which all stages have equally many
    replicas.
    """
    replicas = {int(number) for number in case.replicas.split(",")} if case.replicas else {case.world}
    assert len(replicas) == 1, f"{case.name}: batch statistics need as many replicas in every stage"
    total = sum(case.local_rows)
    slices = []
    for start, stop in intervals(_micro_batch_sizes(total, case.num_micro_batches, min(replicas))):
        slices += intervals(even_sizes(stop - start, min(replicas)), start)
    return slices


def _micro_batch_sizes(total: int, num_micro_batches: int, num_replicas: int) -> list[int]:
    # Fewer micro-batches when a replica would have no row.
    return even_sizes(total, max(1, min(num_micro_batches, total // num_replicas)))


def reference_of(case: Case, entry: Entry) -> Reference:
    """Train the plain model for the case's steps and keep everything that is compared."""
    model = entry.model(case.seed, torch_dtype(case.dtype))
    optimizer = make_optimizer(entry, model) if entry.trains else None
    steps = []
    for number in range(case.num_steps):
        batch = batch_of_step(entry, case, number)
        steps.append(_train_step(case, entry, model, batch))
        if optimizer is not None:
            optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Reference(steps=tuple(steps), state=state)


def _train_step(case: Case, entry: Entry, model: nn.Module, batch: Batch) -> Step:
    model.zero_grad(set_to_none=True)
    rows, scalars, loss = _forward(case, entry, model, batch)
    if loss is not None:
        losses = [loss] * case.world
    else:
        losses = []
        for start, stop in intervals(case.local_rows):
            own = {name: value[start:stop] for name, value in rows.items()}
            losses.append(entry.loss_of(own["output"], entry.slice(batch, start, stop)))
    if entry.trains:
        torch.stack(losses).mean().backward()
    return Step(
        losses=tuple(value.detach().clone() for value in losses),
        rows={name: value.detach().clone() for name, value in rows.items()},
        scalars={name: value.detach().clone() for name, value in scalars.items()},
        gradients={n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def _forward(
    case: Case, entry: Entry, model: nn.Module, batch: Batch
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    if not entry.batch_statistics:
        outputs = entry.call(model, batch)
        loss = entry.loss_of(outputs, batch) if entry.loss_inside else None
        return dict(entry.rows_of(outputs)), dict(entry.scalars_of(outputs)), loss
    parts = []
    with RunningStatistics(case, model) as between:
        for start, stop in statistics_slices(case):
            between(start)
            parts.append(entry.rows_of(entry.call(model, entry.slice(batch, start, stop))))
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    loss = F.cross_entropy(rows["logits"], batch["labels"]) if entry.loss_inside else None
    return rows, {}, loss


class RunningStatistics:
    """Within it, buffers advance only on the first replica of each micro-batch.

    Call the object it gives with the first row of each slice before computing the slice.
    """

    def __init__(self, case: Case, model: nn.Module) -> None:
        num_replicas = int(case.replicas.split(",")[0]) if case.replicas else case.world
        sizes = _micro_batch_sizes(sum(case.local_rows), case.num_micro_batches, num_replicas)
        self._first_rows = {start for start, _ in intervals(sizes)}
        self._buffers = dict(model.named_buffers())
        self._kept: dict[str, Tensor] | None = None

    def __enter__(self) -> Callable[[int], None]:
        return self._before_slice

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _before_slice(self, first_row: int) -> None:
        self._restore()
        if first_row not in self._first_rows:
            self._kept = {name: value.clone() for name, value in self._buffers.items()}

    def _restore(self) -> None:
        if self._kept is not None:
            for name, value in self._kept.items():
                # Through .data: a training backward never reads running statistics, so their version must not
                # count.
                self._buffers[name].data.copy_(value)
        self._kept = None


class ReferenceCache:
    """References by what they depend on, so that cases that differ in the plan only share one. Keeps the
    newest few.
    """

    def __init__(self, most: int = 24) -> None:
        self._most = most
        self._kept: dict[tuple[Any, ...], Reference] = {}

    def get(self, case: Case, entry: Entry) -> Reference:
        """The reference of a case, computed at the first call."""
        key: tuple[Any, ...] = (case.model, case.dtype, case.num_steps, case.seed, sum(case.local_rows))
        if not entry.loss_inside:
            key += (case.local_rows,)
        if entry.batch_statistics:
            key += tuple(statistics_slices(case)) + (case.num_micro_batches,)
        if key not in self._kept:
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = reference_of(case, entry)
        return self._kept[key]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._kept)
