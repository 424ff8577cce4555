"""Rows of sparse gradients: summed over micro-batches and owners, equal on all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rannc_backend.runtime.gradients.sparse_rows import RowSums, memory_of, numbers_of

WORDS, WIDTH = 9, 3


def _looks(rank: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(rank)
    counts = (4, 0) if rank == 1 else (5, 3)
    return [
        (torch.randint(0, WORDS, (n,), generator=numbers), torch.randn(n, WIDTH, generator=numbers).to(dtype))
        for n in counts
    ]


def _kept(rank: int, owners: tuple[int, ...], table: Tensor) -> RowSums:
    sums = RowSums(tables={"t": table}, owners={"t": owners}, rank=rank)
    for index, rows in _looks(rank, table.dtype):
        sums.keep("t", index.int(), rows)
    return sums


def _dense(looks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    for index, rows in looks:
        total.index_add_(0, index, rows.double())
    return total


def test_one_owner_sums_its_micro_batches() -> None:
    sums = _kept(0, (0,), torch.zeros(WORDS, WIDTH, dtype=torch.float64))
    sums.reduce(lambda tensor, ranks, takers: pytest.fail("there is nobody to ask"))
    found = sums.gradient("t", 2.0)
    assert found.is_sparse and found.is_coalesced() and found.shape == (WORDS, WIDTH)
    torch.testing.assert_close(found.to_dense(), 2 * _dense(_looks(0)), rtol=0, atol=1e-14)
    assert set(found.indices()[0].tolist()) == set(torch.cat([index for index, _ in _looks(0)]).tolist())
    again = sums.gradient("t", 1.0)
    assert again.values().data_ptr() != sums.gradient("t", 1.0).values().data_ptr()


class Meeting:
    """Sums over ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._brought: list[list[Tensor]] = [[] for _ in range(size)]

    def starts(self, rank: int, tensor: Tensor) -> Any:
        number = len(self._brought[rank])
        self._brought[rank].append(tensor.clone())

        def wait() -> None:
            self._barrier.wait()
            tensor.zero_()
            for brought in self._brought:
                tensor.add_(brought[number])

        return SimpleNamespace(wait=wait)


def test_owners_with_other_numbers_of_rows_have_the_same_bits() -> None:
    owners, table = (0, 1, 2), torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    meeting = Meeting(len(owners))

    def run(rank: int) -> Tensor:
        sums = _kept(rank, owners, table)
        sums.reduce(lambda tensor, ranks, takers: meeting.starts(rank, tensor))
        return sums.gradient("t", 1.0)

    with ThreadPoolExecutor(len(owners)) as pool:
        found = list(pool.map(run, owners))
    expected = _dense([look for rank in owners for look in _looks(rank)])
    for grad in found:
        assert torch.equal(grad.values(), found[0].values()) and torch.equal(
            grad.indices(), found[0].indices()
        )
        torch.testing.assert_close(grad.to_dense(), expected, rtol=0, atol=1e-14)


def test_only_the_ranks_that_update_a_table_have_its_sum() -> None:
    owners, table = (0, 1, 2), torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    meeting = Meeting(len(owners))
    taken: list[tuple[int, ...]] = []

    def run(rank: int) -> RowSums:
        sums = _kept(rank, owners, table)
        sums.updaters = {"t": (1,)}

        def start(tensor: Tensor, ranks: tuple[int, ...], takers: tuple[int, ...]) -> Any:
            taken.append(takers)
            return meeting.starts(rank, tensor)

        sums.reduce(start)
        return sums

    with ThreadPoolExecutor(len(owners)) as pool:
        found = list(pool.map(run, owners))
    expected = _dense([look for rank in owners for look in _looks(rank)])
    torch.testing.assert_close(found[1].gradient("t", 1.0).to_dense(), expected, rtol=0, atol=1e-14)
    assert [sums.left_to_others for sums in found] == [{"t"}, set(), {"t"}]
    assert not found[0]._sums and not found[2]._sums, "rows where nobody reads them"
    # All learn how many rows there are; the rows go to one.
    assert sorted(taken) == [()] * 3 + [(1,)] * 6


def test_a_table_that_nobody_has_read_has_no_rows() -> None:
    sums = RowSums(tables={"t": torch.zeros(WORDS, WIDTH)}, owners={"t": (0, 1)}, rank=1)
    sums.reduce(lambda tensor, ranks, takers: SimpleNamespace(wait=lambda: None))
    assert sums.gradient("t", 1.0)._nnz() == 0


def test_16_bits_are_rounded_once() -> None:
    table = torch.zeros(WORDS, 1, dtype=torch.bfloat16)
    sums = RowSums(tables={"t": table}, owners={"t": (0,)})
    for _ in range(300):
        sums.keep("t", torch.tensor([4]), torch.ones(1, 1, dtype=torch.bfloat16))
    sums.reduce(lambda tensor, ranks, takers: None)
    assert sums.gradient("t", 1.0).values().item() == 300  # in bfloat16 the sum would stay at 256


def test_numbers_and_memory_of_both_layouts() -> None:
    dense = torch.arange(6.0).view(3, 2)
    twice = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2), check_invariants=True)
    assert torch.equal(numbers_of(twice), torch.full((1, 2), 2.0)) and numbers_of(dense) is not None
    assert torch.equal(numbers_of(dense), dense) and memory_of(dense) == (dense,)
    assert sum(part.nbytes for part in memory_of(twice)) == 2 * 8 + 4 * 4
