"""Gradients of embedding tables as rows: summed over the micro-batches of a step and over ranks, by their numbers.

In: of each backward the numbers of the rows that a table's gradient has, and the rows. Out: after the last one, one
sparse tensor per table, equal bit by bit on all ranks that update it: its owners, or under ZeRO some of them alone.

Ranks have different numbers of rows. They exchange these numbers, then the rows: each fills its own part of a tensor of
all of them and zeros elsewhere, and the tensors are summed, which is exact. Every rank adds up the same rows in the same
order then, that of the ranks. The host reads how many rows there are, so the tables are on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rannc_backend.kernels.gradient_writes import sum_dtype
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.world import Ranks

StartReduce = Callable[[Tensor, Ranks, Ranks], Any]
"""Starts to sum a tensor in place over ranks, for those that take the sum; () for all."""
Rows = tuple[Tensor, Tensor]
"""Numbers of rows, and the rows, [rows, width]."""


@dataclass(slots=True, kw_only=True)
class RowSums:
    """The rows of one step. ``tables``: parameters; ``owners``: the ranks that have each; ``updaters``: those that need
    its gradient, where not all do; ``rank``: this one.
    """

    tables: Mapping[str, Tensor]
    owners: Mapping[str, Ranks]
    updaters: Mapping[str, Ranks] = field(default_factory=dict)
    rank: int = 0
    _kept: dict[str, list[Rows]] = field(default_factory=dict)
    _sums: dict[str, Rows] = field(default_factory=dict)

    def keep(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Rows of one look-up in one micro-batch. Those of 16 bits are summed in float32, and rounded once."""
        wide = rows.to(sum_dtype(rows.dtype, wide=True))
        self._kept.setdefault(name, []).append((index.long(), wide))

    def reduce(self, start_reduce: StartReduce | None) -> None:
        """Sum what was kept, over the owners of each table. Collective among these. None: this rank's alone."""
        groups = {name: (self.owners[name], self.updaters.get(name, ())) for name in self.tables}
        for ranks, takers in sorted(set(groups.values())):
            names = sorted(name for name, group in groups.items() if group == (ranks, takers))
            own = {name: self._own(name) for name in names}
            if start_reduce is not None and len(ranks) > 1:
                own = self._of_all(own, ranks, takers, start_reduce)
            self._sums |= own
        self._kept.clear()

    @property
    def left_to_others(self) -> frozenset[str]:
        """The tables that only others update."""
        return frozenset(name for name, ranks in self.updaters.items() if self.rank not in ranks)

    def gradient(self, name: str, scale: Number) -> Tensor:
        """``scale`` times the sum, as a sparse tensor of the table's shape in memory of its own."""
        index, rows = self._sums[name]
        table = self.tables[name]
        values = (rows * scale).to(table.dtype)
        return torch.sparse_coo_tensor(
            index[None], values, table.shape, is_coalesced=True, check_invariants=False
        )

    def _own(self, name: str) -> Rows:
        kept = self._kept.get(name, ())
        if not kept:
            table = self.tables[name]
            dtype = sum_dtype(table.dtype, wide=True)
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, table.shape[1], dtype=dtype)
        return _summed(torch.cat([index for index, _ in kept]), torch.cat([rows for _, rows in kept]))

    def _of_all(
        self, own: Mapping[str, Rows], ranks: Ranks, takers: Ranks, start_reduce: StartReduce
    ) -> dict[str, Rows]:
        """The sums over ``ranks``; nothing where only others take them."""
        place = ranks.index(self.rank)
        counts = torch.zeros(len(ranks), len(own), dtype=torch.int64)
        counts[place] = torch.tensor([len(index) for index, _ in own.values()])
        start_reduce(counts, ranks, ()).wait()
        begins = counts[:place].sum(0).tolist()
        found, works = {}, []
        for (name, given), begin, total in zip(own.items(), begins, counts.sum(0).tolist(), strict=True):
            found[name] = tuple(part.new_zeros(total, *part.shape[1:]) for part in given)
            for part, of_all in zip(given, found[name], strict=True):
                of_all[begin : begin + len(part)] = part
                works += [start_reduce(of_all, ranks, takers)] if total else []
        for work in works:
            work.wait()
        if takers and self.rank not in takers:
            return {}
        return {name: _summed(index, rows) for name, (index, rows) in found.items()}


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers of a gradient, or of any tensor; of a sparse one those of its rows, each row once."""
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one is made of; itself where it is dense."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _summed(index: Tensor, rows: Tensor) -> Rows:
    """Each number once, ascending, with the sum of its rows in the order in which they are given."""
    numbers, places = torch.unique(index, return_inverse=True)
    return numbers, rows.new_zeros(len(numbers), rows.shape[1]).index_add_(0, places, rows)
