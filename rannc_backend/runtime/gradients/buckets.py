"""Flat buffers in which the gradients of one step are summed over micro-batches and then over ranks.

In: the parameters of this rank with the ranks that own each of them, and backwards that write gradients into
the buckets. Out: per step, one view per parameter of the reduced gradient; ``publish`` puts these views where
``torch.optim`` looks for them. Where nothing was published before, nothing is copied on the way.

Gradients of 16 bits may be summed in float32; what is published then is rounded once, in memory of its own.

Terms. A *bucket* holds parameters of one dtype and one owner group (the ranks that own all of them: the
replicas of a stage, or of several stages for tied parameters). A bucket's all-reduce starts when its last
gradient of the last micro-batch is there, in bucket order within an owner group, so that all its ranks start
them alike; that of a bucket of several stages after the last backward, since other stages may need what this
backward sends before they come to theirs. A *pending* gradient belongs to a step whose backward has not been
asked for yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from rannc_backend.runtime.comm.host_link import HostLink, UnderWay
from rannc_backend.runtime.gradients.bucket_layout import UNDIVIDED, BucketLayout, BucketSpec, Division, Slot
from rannc_backend.runtime.gradients.loss_gradients import Number, scale_buffers
from rannc_backend.runtime.gradients.sparse_rows import RowSums
from rannc_backend.runtime.torch_internals import (
    accumulation_hooks,
    any_hooks,
    gradient_hooks,
    num_storage_users,
)
from rannc_backend.runtime.world import Ranks


class Waitable(Protocol):
    """A started all-reduce."""

    def wait(self) -> None:
        """Block until the result is there."""


class StartReduce(Protocol):
    """Starts to sum a bucket in place; ``takers`` are those that need the sum, where not all do."""

    def __call__(self, buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> Waitable: ...


NewBuffer = Callable[[BucketSpec], torch.Tensor]
"""Makes the memory of a bucket. Zeros, since what lies between gradients is summed and scaled with them;
nobody reads it.
"""


def zeros_for(spec: BucketSpec) -> torch.Tensor:
    """Memory of this process alone."""
    return torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)


Templates = dict[tuple[int, tuple[int, ...]], torch.Tensor]
"""Views of one buffer by offset and shape. They stay with it: to make a view anew takes several times as long
as to copy one.
"""


@dataclass(frozen=True, slots=True)
class PooledBuffer:
    """A buffer of the pool and the views of it that stay."""

    memory: torch.Tensor
    templates: Templates = field(default_factory=dict)


class BucketMemory(NamedTuple):
    """A buffer while a step uses it: in use as long as ``flat`` or a view of it is somewhere."""

    flat: torch.Tensor
    templates: Templates

    def view(self, slot: Slot) -> torch.Tensor:
        """A new tensor over a slot's memory. Not a view to autograd: Dynamo would follow p.grad to its base,
        and fail over its sizes.
        """
        template = self.templates.get(slot.place)
        if template is None:
            template = self.flat.new_empty(0).set_(  # type: ignore[call-overload]
                self.flat, slot.offset, slot.shape, slot.stride
            )
            self.templates[slot.place] = template
        return template.data

    def views(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """`view` of each."""
        templates = self.templates
        try:
            return [templates[slot.place].data for slot in slots]
        except KeyError:
            return [self.view(slot) for slot in slots]


@dataclass(slots=True)
class BufferPool:
    """Flat buffers that are used again when nobody else refers to them, so that a gradient that the user
    keeps is never overwritten.

    Shared by all graphs of a model: ``p.grad`` of one graph's step keeps its buffers from the others.
    """

    _buffers: dict[tuple[int, torch.dtype, torch.device, Ranks], list[PooledBuffer]] = field(
        default_factory=dict
    )

    def take(self, spec: BucketSpec, new_buffer: NewBuffer) -> BucketMemory:
        """A buffer for a bucket, free again when the result's memory and all views of it are gone. New ones
        hold zeros.
        """
        buffers = self._buffers.setdefault((spec.numel, spec.dtype, spec.device, spec.ranks), [])
        for buffer in buffers:
            if num_storage_users(buffer.memory) == 1 + len(buffer.templates):
                return BucketMemory(buffer.memory.data, buffer.templates)
        buffers.append(PooledBuffer(new_buffer(spec)))
        return BucketMemory(buffers[-1].memory.data, buffers[-1].templates)

    def tensors(self) -> list[torch.Tensor]:
        """Every buffer that has been made so far."""
        return [buffer.memory for buffers in self._buffers.values() for buffer in buffers]


@dataclass(slots=True, kw_only=True)
class PendingGradients:
    """Gradients of one step: written and added up in place, reduced, then handed out as views."""

    layout: BucketLayout
    memory: list[BucketMemory]
    start_reduce: StartReduce
    host_link: HostLink | None = None  # where what is summed goes to the host, bucket by bucket
    pool: BufferPool | None = None  # of the host's memory then
    is_local: bool = False  # all owners keep what is theirs, to be summed later
    rows: RowSums | None = None  # of tables, which have no bucket
    in_last_micro_batch: bool = False
    ended: bool = False  # the last backward has
    received: set[str] = field(default_factory=set)
    others_to_come: dict[str, int] = field(default_factory=dict)
    _views: dict[str, torch.Tensor] = field(default_factory=dict)
    _missing: list[set[str]] = field(default_factory=list)
    _works: list[Waitable | None] = field(default_factory=list)
    _started: list[bool] = field(default_factory=list)
    _left: set[int] = field(default_factory=set)  # buckets that have left the device
    _under_way: list[UnderWay] = field(default_factory=list)  # to the host

    def __post_init__(self) -> None:
        if self.rows is not None:
            # Graphs take something for each gradient, also where they do not write it.
            self._views.update((name, table.new_zeros(1)) for name, table in self.rows.tables.items())

    def view(self, name: str) -> torch.Tensor:
        """The parameter's gradient, in the memory of its bucket; always the same tensor."""
        view = self._views.get(name)
        if view is None:
            bucket = self.layout.slots[name].bucket
            # All of its bucket at once: they are asked for together.
            self._views.update(
                zip(
                    self.layout.buckets[bucket].names, self.memory[bucket].views(self.layout.slots_of[bucket])
                )
            )
            view = self._views[name]
        return view

    @property
    def updated_buffers(self) -> list[torch.Tensor]:
        """The memory of the buckets whose sums this rank needs."""
        pairs = zip(self.memory, self.layout.buckets, strict=True)
        return [memory.flat for memory, bucket in pairs if bucket.is_updated_here or self.is_local]

    def target(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where a micro-batch's gradient is to be written, and whether the sum of earlier ones is there to
        add to.
        """
        return self.view(name), name in self.received

    def targets(self, names: Sequence[str]) -> tuple[list[torch.Tensor], list[bool]]:
        """`target` of each."""
        received = self.received
        return self.views(names), [name in received for name in names] if received else [False] * len(names)

    def made(self, name: str) -> None:
        """One micro-batch's gradient has been written; starts the bucket's all-reduce when it was the last
        one that is missing.
        """
        self.all_made([name])

    def all_made(self, names: Sequence[str], *, is_last: bool = True) -> None:
        """`made` of each. ``is_last``: by a stage whose last backward has begun."""
        self.received.update(names)
        if self.in_last_micro_batch and is_last:
            slots, others, is_full = self.layout.slots, self.others_to_come, False
            for name in names:
                slot = slots.get(name)
                if slot is None:
                    continue
                missing = self._missing[slot.bucket]
                if others and others.get(name):
                    others[name] -= 1
                else:
                    missing.discard(name)
                is_full = is_full or not missing
            if is_full:
                self._start_ready()

    def views(self, names: Sequence[str]) -> list[torch.Tensor]:
        """`view` of each."""
        if len(self._views) < self._num_gradients:
            return [self.view(name) for name in names]
        return list(map(self._views.__getitem__, names))

    def begin_last_micro_batch(self, others_to_come: Mapping[str, int] | None = None) -> None:
        """The last micro-batch's backward begins: from now on each gradient that comes is final, but those that other
        stages of this rank make too: ``others_to_come``, how many more.
        """
        assert not self.in_last_micro_batch, "the last micro-batch begins twice"
        self.in_last_micro_batch = True
        self.others_to_come = dict(others_to_come or {})
        self._missing = [set(bucket.names) for bucket in self.layout.buckets]
        self._works = [None] * len(self.layout.buckets)
        self._started = [False] * len(self.layout.buckets)

    def finish(self) -> None:
        """Start what has not been started (gradients that never came count as zero) and wait for all
        reductions. Once for all stages of a rank.
        """
        if self.ended:
            return
        if not self.in_last_micro_batch:
            self.begin_last_micro_batch()
        for name in (
            self.layout.slots.keys() - self.received if len(self.received) < self._num_gradients else ()
        ):
            self.view(name).zero_()
        for missing in self._missing:
            missing.clear()
        self.ended = True
        self._start_ready()
        for index, (work, bucket) in enumerate(zip(self._works, self.layout.buckets, strict=True)):
            if work is not None:
                work.wait()
            if self.host_link is not None or not (bucket.is_kept or self.is_local):
                self._leave(index)
        for under_way in self._under_way:
            under_way.wait()
        if self.rows is not None:
            self.rows.reduce(None if self.is_local else self.start_reduce)

    @property
    def _num_gradients(self) -> int:
        return len(self.layout.slots) + (0 if self.rows is None else len(self.rows.tables))

    def wait_on_host(self) -> None:
        """Let the host wait for gradients that come to it."""
        for under_way in self._under_way:
            under_way.wait_on_host()
        self._under_way.clear()

    def _leave(self, index: int) -> None:
        """A bucket leaves the device: what this rank needs of it goes to the host, the rest is forgotten."""
        if index in self._left:
            return
        self._left.add(index)
        bucket, memory = self.layout.buckets[index], self.memory[index]
        link = self.host_link
        self.memory[index] = BucketMemory(memory.flat.new_empty(0), {})
        if link is not None and (bucket.is_updated_here or self.is_local):
            assert self.pool is not None, "no memory on the host"
            on_host = replace(bucket, device=torch.device("cpu"))
            self.memory[index] = self.pool.take(
                on_host, lambda spec: link.host_memory(spec.numel, spec.dtype)
            )
            self._under_way.append(link.bring(memory.flat, self.memory[index].flat))
        for name in bucket.names:
            self._views.pop(name, None)

    def _start_ready(self) -> None:
        blocked: set[Ranks] = set()
        for index, bucket in enumerate(self.layout.buckets):
            if self._started[index]:
                continue
            if self._missing[index]:
                blocked.add(bucket.ranks)
            elif bucket.ranks not in blocked and (self.ended or not bucket.is_shared):
                self._started[index] = True
                if len(bucket.ranks) > 1:
                    self._works[index] = self.start_reduce(
                        self.memory[index].flat, bucket.ranks, bucket.updaters
                    )
                elif self.host_link is not None:
                    self._leave(index)


@dataclass(frozen=True, slots=True)
class StageGradients:
    """What one stage's backward writes to: pending gradients by the position of the parameter among the
    stage's inputs. ``is_last``: no backward of the stage comes after this one.
    """

    pending: PendingGradients
    names: Mapping[int, str]
    is_last: bool = True

    def targets(self, positions: Sequence[int]) -> tuple[list[torch.Tensor], list[bool]]:
        """`target` of each."""
        return self.pending.targets(list(map(self.names.__getitem__, positions)))

    def all_made(self, positions: Sequence[int]) -> None:
        """`made` of each."""
        names = self.names
        self.pending.all_made([names[position] for position in positions], is_last=self.is_last)

    def target(self, position: int) -> tuple[torch.Tensor, bool]:
        """See `PendingGradients.target`."""
        return self.pending.target(self.names[position])

    def made(self, position: int) -> None:
        """See `PendingGradients.made`."""
        self.pending.all_made([self.names[position]], is_last=self.is_last)

    def keep_rows(self, position: int, index: torch.Tensor, rows: torch.Tensor) -> None:
        """See `RowSums.keep`."""
        assert self.pending.rows is not None, "rows of a gradient that has a bucket"
        self.pending.rows.keep(self.names[position], index, rows)


@dataclass(slots=True)
class _Rounded:
    """The gradients of one step in the dtypes of their parameters, bucket by bucket as they are asked for."""

    pending: PendingGradients
    pool: BufferPool
    _memory: dict[int, BucketMemory] = field(default_factory=dict)

    def view(self, name: str) -> torch.Tensor:
        """A gradient that is summed in a wider dtype, rounded."""
        slot = self.pending.layout.slots[name]
        memory = self._memory.get(slot.bucket)
        if memory is None:
            spec = self.pending.layout.buckets[slot.bucket]
            assert spec.rounded_to is not None, f"the gradient of {name} has another dtype than its parameter"
            wide = self.pending.memory[slot.bucket].flat
            memory = self.pool.take(replace(spec, dtype=spec.rounded_to, device=wide.device), zeros_for)
            memory.flat.copy_(wide)
            self._memory[slot.bucket] = memory
        return memory.view(slot)


@dataclass(slots=True, kw_only=True)
class GradientBuckets:
    """Makes the pending gradients of a step and publishes them as ``p.grad``: views of the buckets in which
    they were made.
    """

    layout: BucketLayout
    parameters: Mapping[str, torch.Tensor]
    stage_ranks: Ranks
    start_reduce: StartReduce
    new_buffer: NewBuffer = zeros_for
    pool: BufferPool = field(default_factory=BufferPool)
    host_link: HostLink | None = None
    table_owners: Mapping[str, Ranks] = field(default_factory=dict)  # of the parameters with sparse gradients
    division: Division = UNDIVIDED

    def pending(self) -> PendingGradients:
        """Empty gradients for one step."""
        link = self.host_link
        memory = [
            self.pool.take(bucket, self.new_buffer)
            if bucket.is_kept and link is None
            else BucketMemory(zeros_for(bucket), {})
            for bucket in self.layout.buckets
        ]
        if link is not None:
            link.gradients.add([each.flat for each in memory])
        return PendingGradients(
            layout=self.layout,
            memory=memory,
            start_reduce=self.start_reduce,
            host_link=link,
            pool=self.pool,
            rows=self._rows() if self.table_owners else None,
        )

    def _rows(self) -> RowSums:
        tables = {name: self.parameters[name] for name in self.table_owners}
        updaters = {name: ranks for name in tables if (ranks := self.division.updaters(name))}
        return RowSums(tables=tables, owners=self.table_owners, updaters=updaters, rank=self.division.rank)

    def tensors(self) -> list[torch.Tensor]:
        """Every buffer that has been made so far."""
        return self.pool.tensors()

    def publish(
        self, pending: PendingGradients, scale: Number, *, keep: bool, without: frozenset[str] = frozenset()
    ) -> None:
        """Add ``scale`` times the pending gradients to ``p.grad`` of every parameter of this rank, as the parameters' hooks
        want them; but of those ``without`` one, which no gradient came to on any rank: theirs stays as it is.

        A hook gets what it gets in one process: the gradient of the whole batch, once per backward. ``keep``: the
        pending gradients will be published again (retain_graph), so they must not be given away.
        """
        names = self._names_with_gradient(pending, without)
        rounded = _Rounded(pending, self.pool)
        if self.host_link is not None:
            pending.wait_on_host()
            scale = float(scale)
        if not keep:
            scale_buffers(pending.updated_buffers, scale)
        if not keep and not any_hooks(self.parameters.values()):
            rows = pending.rows
            for name, view in zip(names, pending.views(names)):
                parameter = self.parameters[name]
                if rows is not None and name in rows.tables:
                    _add(parameter, rows.gradient(name, scale))
                elif parameter.grad is None:
                    parameter.grad = view if view.dtype == parameter.dtype else rounded.view(name)
                else:
                    # A wider sum is added as it is: it is rounded once, with what is there.
                    parameter.grad.add_(view)
            return
        for name in names:
            parameter, view = self.parameters[name], pending.view(name)
            if pending.rows is not None and name in pending.rows.tables:
                view = pending.rows.gradient(name, scale)
            elif keep:
                view = (view * scale).to(parameter.dtype)
            elif view.dtype != parameter.dtype:
                view = rounded.view(name)
            for change in gradient_hooks(parameter):
                changed = change(view)
                view = view if changed is None else changed
            _add(parameter, view)
            for tell in accumulation_hooks(parameter):
                tell(parameter)

    def outside_changes(self, number: int) -> list[float] | None:
        """What ranks compare of parameters that not all owners update, at the begin of step ``number``."""
        return None

    def check_outside_changes(
        self, stage_ranks: Sequence[Ranks], found_by_rank: Sequence[list[float] | None]
    ) -> None:
        """Look at what ranks have compared."""
        return

    def has_hooks(self) -> bool:
        """Whether the user wants to see, or change, a gradient of this rank."""
        return any(
            gradient_hooks(parameter) or accumulation_hooks(parameter)
            for parameter in self.parameters.values()
        )

    def _names_with_gradient(self, pending: PendingGradients, without: frozenset[str]) -> list[str]:
        """Without those where no gradient flows, on any of the parameter's ranks: as in plain torch,
        ``p.grad`` stays as it is. And without those that only others update.
        """
        received = pending.received
        others = frozenset[str]() if pending.is_local else self.layout.left_to_others
        if pending.rows is not None and not pending.is_local:
            others |= pending.rows.left_to_others
        others |= without
        if len(received) == len(self.parameters) and not others:
            return list(self.parameters)
        ranks_of = {name: bucket.ranks for bucket in self.layout.buckets for name in bucket.names}
        ranks_of.update(self.table_owners)
        return [
            name
            for name in self.parameters
            if (name in received or ranks_of[name] != self.stage_ranks) and name not in others
        ]


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """To ``p.grad``, as autograd does: a sum with a sparse gradient is a tensor of its own, since the user may have
    kept the one before.
    """
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient.is_sparse:
        total = parameter.grad + gradient
        parameter.grad = total.coalesce() if total.is_sparse else total
    else:
        parameter.grad.add_(gradient)
