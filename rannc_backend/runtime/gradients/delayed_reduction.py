"""Gradients that stay each rank's own over several steps and are summed over ranks once:
`delay_grad_allreduce`.

In: a model's table and the switch. Out: buckets that leave out the all-reduce while it is delayed, and
`reduce_gradients`, which makes it good. Terms: gradients are *local* while ``p.grad`` holds sums over this
rank's rows only; all gradients of a model are local, or none.

Exactness. What had been reduced before the first delayed step (a step without delay, then one with) is in
``p.grad`` of every owner, and would be counted once per owner in the sum to come: it is kept on the first
owner alone. A step that ends a delay is delayed itself and reduced together with what came before, so that
there is one all-reduce and no rounding of its own. Local gradients are in ``p.grad``, hence in the parameter's
dtype; where gradients of 16 bits are summed in float32, the sum over owners is too, and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.bucket_layout import Division, plan_buckets
from rannc_backend.runtime.gradients.buckets import GradientBuckets, PendingGradients, StartReduce, zeros_for
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.gradients.new_values import check_outside_changes, outside_changes, send_new_values
from rannc_backend.runtime.gradients.sparse_rows import RowSums
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.state_hooks import Ranks
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import accumulation_hooks


class _Later:
    """Nothing to wait for: the reduction comes with `reduce_gradients`."""

    def wait(self) -> None:
        return


def _later(buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> _Later:
    return _Later()


@dataclass(slots=True, kw_only=True)
class DelayableBuckets(GradientBuckets):
    """Buckets of one graph of a model; ``capacity_bytes``, ``max_buckets``: size of the buckets of a reduction that
    was delayed, ``wide_sums``: whether it sums gradients of 16 bits in float32.
    """

    table: ParameterTable
    switches: Switches
    capacity_bytes: float
    max_buckets: int = 0
    wide_sums: bool = False

    def pending(self) -> PendingGradients:
        """Empty gradients for one step; they are not reduced while that is delayed, or deferred."""
        pending = GradientBuckets.pending(self)
        if self.switches.delay_reductions or self.table.gradients_are_local:
            pending.start_reduce, pending.is_local = _later, True
        return pending

    def publish(
        self, pending: PendingGradients, scale: Number, *, keep: bool, without: frozenset[str] = frozenset()
    ) -> None:
        """As of `GradientBuckets`; then reduce, unless that is delayed."""
        table = self.table
        local = pending.is_local
        if local and not table.gradients_are_local:
            _count_once(table)
            table.gradients_are_local = True
        elif table.gradients_are_local and not local:
            self.reduce()
        table.is_in_backward = True
        try:
            GradientBuckets.publish(self, pending, scale, keep=keep, without=without)
        finally:
            table.is_in_backward = False
        if table.updates:
            # Hooks may have stepped an optimizer, where a gradient is.
            send_new_values(table, [n for n, p in self.parameters.items() if accumulation_hooks(p)])
        if table.gradients_are_local and not self.switches.delay_reductions:
            self.reduce()

    def outside_changes(self, number: int) -> list[float] | None:
        """See `new_values.outside_changes`; raises UserInputError where copies of parameters were changed."""
        self.table.given.check([self.table.given.changed()])
        return outside_changes(self.table, number)

    def check_outside_changes(
        self, stage_ranks: Sequence[Ranks], found_by_rank: Sequence[list[float] | None]
    ) -> None:
        """See `new_values.check_outside_changes`."""
        check_outside_changes(self.table, stage_ranks, found_by_rank)

    def reduce(self) -> None:
        """Sum all local gradients of the model over their owners."""
        reduce_gradients(
            self.table,
            self.start_reduce,
            self.capacity_bytes,
            max_buckets=self.max_buckets,
            wide_sums=self.wide_sums,
        )


def reduce_gradients(
    table: ParameterTable,
    start_reduce: StartReduce,
    capacity_bytes: float,
    *,
    max_buckets: int = 0,
    wide_sums: bool = False,
) -> None:
    """Sum the gradients of every parameter over its owners, in flat buckets. Collective among owners; nothing
    to do on one rank.
    """
    parameters = dict(table.module().named_parameters())
    present = {
        name: p
        for name, p in sorted(parameters.items())
        if p.grad is not None and len(table.owners[name]) > 1
    }
    in_rows = {name: p for name, p in present.items() if p.grad is not None and p.grad.is_sparse}
    _reduce_rows(table, in_rows, start_reduce)
    mine = [(name, p) for name, p in present.items() if name not in in_rows]
    division = Division(updates=table.updates, rank=table.world.rank)
    device = table.world.device
    layout = plan_buckets(
        mine,
        table.owners,
        (),
        capacity_bytes,
        division,
        max_buckets=max_buckets,
        wide_sums=wide_sums,
        device=device,
    )
    # The same order on all ranks, whatever stages they have: owner groups may overlap.
    for bucket in sorted(layout.buckets, key=lambda bucket: (bucket.ranks, bucket.names)):
        buffer = zeros_for(bucket)
        views = []
        for name in bucket.names:
            slot = layout.slots[name]
            # As in buckets.py: not a view to autograd, which Dynamo would follow.
            views.append(
                buffer.new_empty(0)
                .set_(buffer, slot.offset, slot.shape, slot.stride)  # type: ignore[call-overload]
                .copy_(parameters[name].grad)
            )
        start_reduce(buffer, bucket.ranks, bucket.updaters).wait()
        for name, view in zip(bucket.names, views, strict=True):
            parameters[name].grad = view.to(parameters[name]) if bucket.is_updated_here else None
    table.gradients_are_local = False


def _reduce_rows(
    table: ParameterTable, tables: Mapping[str, torch.Tensor], start_reduce: StartReduce
) -> None:
    """Sum the gradients of parameters that have sparse ones, as rows."""
    rows = RowSums(
        tables=tables,
        owners={name: table.owners[name] for name in tables},
        updaters={name: table.updaters(name) for name in tables if name in table.updates},
        rank=table.world.rank,
    )
    for name, parameter in tables.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        own = parameter.grad.coalesce()
        rows.keep(name, own.indices()[0], own.values())
    rows.reduce(start_reduce)
    for name, parameter in tables.items():
        parameter.grad = None if name in rows.left_to_others else rows.gradient(name, 1.0)


def _count_once(table: ParameterTable) -> None:
    if table.updates:
        _complete(table)
    for name, parameter in table.module().named_parameters():
        if parameter.grad is not None and table.owns(name) and not table.counts(name):
            # Not in place: the user may have kept the tensor.
            parameter.grad = torch.zeros_like(parameter.grad)


def _complete(table: ParameterTable) -> None:
    """Zeros for gradients that are reduced, on those owners that do not update: all owners have a part of the sum to
    come. Collective.
    """
    parameters = dict(table.module().named_parameters())
    known = sorted(table.updates)
    given = agree(table.world, "reduced gradients", [_layout(parameters[name].grad) for name in known])
    for index, name in enumerate(known):
        layout = given[table.updaters(name)[0]][index]
        if layout and table.owns(name) and parameters[name].grad is None:
            zeros = torch.zeros_like(parameters[name])
            parameters[name].grad = zeros.to_sparse(1) if layout == _SPARSE else zeros


_DENSE, _SPARSE = 1, 2


def _layout(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else _SPARSE if gradient.is_sparse else _DENSE
