"""Sums in shared memory: ranks are threads, and their collectives are played by a table of who has come."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.runtime.comm import shared_memory_allreduce as shared_sums
from rannc_backend.runtime.comm.shared_memory_allreduce import SharedSums

LIMIT_SECONDS = 20.0


@dataclass
class Played:
    """One collective as one rank sees it."""

    group: PlayedGroup
    number: int
    tensor: torch.Tensor
    seen: bool = False

    def is_completed(self) -> bool:
        return len(self.group.given[self.number]) == self.group.size

    def wait(self, limit_seconds: float | None = None) -> None:
        with self.group.changed:
            assert self.group.changed.wait_for(self.is_completed, LIMIT_SECONDS), (
                "a collective that not all ranks have started"
            )
        if not self.seen:
            self.seen = True
            given = self.group.given[self.number]
            self.tensor.copy_(sum(given[rank] for rank in sorted(given)))


@dataclass
class PlayedGroup:
    """A process group: its i-th collective is the i-th of every rank, whatever they meant it to be, as in
    gloo.
    """

    size: int
    given: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def starter(self, rank: int) -> Callable[[torch.Tensor], Played]:
        def start(tensor: torch.Tensor) -> Played:
            with self.changed:
                number = self.started.get(rank, 0)
                self.started[rank] = number + 1
                others = self.given.setdefault(number, {})
                assert all(other.shape == tensor.shape for other in others.values()), (
                    "ranks have started different collectives"
                )
                others[rank] = tensor.clone()
                self.changed.notify_all()
            return Played(self, number, tensor)

        return start


def make_ranks(size: int) -> list[SharedSums]:
    """The sums of every rank, with one group of all."""
    plain, announce, answer = PlayedGroup(size), PlayedGroup(size), PlayedGroup(size)
    ranks = tuple(range(size))
    made = []
    for rank in ranks:
        start = plain.starter(rank)
        sums = SharedSums(
            rank=rank,
            places=("here",) * size,
            plain=lambda tensor, group, takers, communicator, start=start: start(tensor),
        )
        sums.add(ranks, announce=announce.starter(rank), answer=answer.starter(rank))
        made.append(sums)
    return made


def together(size: int, work: Callable[[int], object]) -> None:
    """Run every rank's part in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(work, rank) for rank in range(size)]:
            future.result(LIMIT_SECONDS)


def value(rank: int, bucket: int, step: int, numel: int) -> torch.Tensor:
    return torch.randn(
        numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * rank + 10 * bucket + step)
    )


def train(sums: SharedSums, rank: int, size: int, sizes: list[int], num_steps: int, seed: int) -> int:
    """Steps with buckets of these sizes that start and end at times of their own; the number of buckets in
    shared memory.
    """
    chance = random.Random(100 * seed + rank)
    group = tuple(range(size))
    buckets = [sums.new_bucket(numel, torch.float64, group) for numel in sizes]
    for step in range(num_steps):
        works = []
        for number, bucket in enumerate(buckets):
            bucket.copy_(value(rank, number, step, bucket.numel()))
            # Of every other bucket one rank needs the sum.
            works.append(sums.reduce(bucket, group, (number % size,) if number % 2 else ()))
            time.sleep(chance.random() * 0.002)
        for work in works:
            work.wait(LIMIT_SECONDS)
            work.wait(LIMIT_SECONDS)
            time.sleep(chance.random() * 0.001)
        for number, bucket in enumerate(buckets):
            expected = sum(value(other, number, step, bucket.numel()) for other in group)
            needed = number % 2 == 0 or number % size == rank
            assert not needed or torch.equal(bucket, expected), (rank, step, number)
            bucket.mul_(2)  # as scaling does: nobody may read it any more
    return sum(sums._memory.chunk_of(bucket) is not None for bucket in buckets)


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    num_steps=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_buckets_are_summed(size: int, sizes: list[int], num_steps: int, seed: int) -> None:
    ranks = make_ranks(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_sums, "_FEWEST_BYTES", 1)
        together(
            size,
            lambda rank: (
                train(ranks[rank], rank, size, sizes, num_steps, seed) == len(sizes)
                or pytest.fail("not shared")
            ),
        )


@pytest.mark.parametrize("fails", ["memory", "opening"])
def test_one_rank_that_cannot_share_makes_all_sum_over_gloo(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_sums, "_FEWEST_BYTES", 1)
    caplog.set_level(logging.INFO, "rannc_backend")
    monkeypatch.setattr(
        shared_sums, "logger", logging.getLogger(f"rannc_backend.{fails}")
    )  # which has said nothing yet
    ranks = make_ranks(3)
    if fails == "memory":
        monkeypatch.setattr(ranks[1]._memory, "zeros", _no_memory)
    else:
        monkeypatch.setattr(ranks[1]._memory, "open", lambda handle, like: None)
    sums = []
    monkeypatch.setattr(shared_sums, "add_up", lambda *arguments, **others: sums.append(arguments))
    together(3, lambda rank: train(ranks[rank], rank, 3, [70, 8, 200], 3, 0))
    assert not sums, "a bucket was summed in memory that one rank does not have"
    assert "cannot share memory: their gradients are summed over gloo" in caplog.text
    assert ("No space left" in caplog.text) == (fails == "memory")


def _no_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    raise OSError(28, "No space left on device")


def test_a_bucket_that_one_rank_has_not_shared_is_the_only_one_over_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_sums, "_FEWEST_BYTES", 1)
    ranks = make_ranks(2)
    shared: list[int] = []
    real = shared_sums.add_up

    def counted(parts: list[torch.Tensor], index: int, **others: Any) -> None:
        shared.append(parts[0].numel())
        real(parts, index, **others)

    monkeypatch.setattr(shared_sums, "add_up", counted)

    def work(rank: int) -> None:
        sums = ranks[rank]
        buckets = [sums.new_bucket(64, torch.float64, (0, 1)), torch.zeros(32, dtype=torch.float64)]
        if rank == 0:
            buckets[1] = sums.new_bucket(32, torch.float64, (0, 1))
        for bucket in buckets:
            bucket.fill_(rank + 1)
        for started in [sums.reduce(bucket, (0, 1)) for bucket in buckets]:
            started.wait(LIMIT_SECONDS)
        assert all(torch.equal(bucket, torch.full_like(bucket, 3)) for bucket in buckets)

    together(2, work)
    assert shared == [64, 64]


def test_what_buckets_have_met_is_asked_once_and_forgotten_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sums, "_FEWEST_BYTES", 1)
    before = len(os.listdir("/proc/self/fd"))
    ranks = make_ranks(2)
    together(2, lambda rank: train(ranks[rank], rank, 2, [50, 60], 4, 1))
    answers = ranks[0]._groups[0, 1].answer(torch.zeros(1))
    # A question for each of two buckets that meet, an answer for each of two buckets in four steps, and this
    # one.
    assert answers.number + 1 == 2 + 2 * 4 + 1  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before, "memory is kept that nobody uses"


def test_an_earlier_bucket_is_summed_when_a_later_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So sums are made while a backward runs, not at its end."""
    monkeypatch.setattr(shared_sums, "_FEWEST_BYTES", 1)
    ranks = make_ranks(2)
    buckets = [
        [ranks[rank].new_bucket(16, torch.float64, (0, 1)).fill_(rank + 1) for _ in range(4)]
        for rank in (0, 1)
    ]
    works = []
    for number in range(4):
        for rank in (0, 1):
            works.append(ranks[rank].reduce(buckets[rank][number], (0, 1)))
    # Both have announced three buckets, asked about the first, and summed it: nobody has waited.
    assert torch.equal(buckets[0][0], torch.full((16,), 3.0, dtype=torch.float64))
    together(2, lambda rank: [work.wait(LIMIT_SECONDS) for work in works[rank::2]])
    assert all(torch.equal(bucket, torch.full_like(bucket, 3)) for own in buckets for bucket in own)


def test_small_buckets_and_groups_of_several_hosts_go_over_gloo() -> None:
    calls = []
    sums = SharedSums(
        rank=0,
        places=("a", "a", "b", ""),
        plain=lambda tensor, ranks, takers, number: calls.append((tensor, ranks)),
    )
    assert (
        sums.possible((0, 1))
        and not sums.possible((0, 2))
        and not sums.possible((0,))
        and not sums.possible((2, 3))
    )
    assert not SharedSums(rank=0, places=("", ""), plain=sums._plain).possible((0, 1))
    sums.add((0, 1), announce=pytest.fail, answer=pytest.fail)  # type: ignore[arg-type]
    small, far = torch.zeros(10), torch.zeros(2**20)
    sums.reduce(small, (0, 1))
    sums.reduce(far, (0, 2))
    assert [(call[0] is tensor, call[1]) for call, tensor in zip(calls, (small, far), strict=True)] == [
        (True, (0, 1)),
        (True, (0, 2)),
    ]
    assert sums._memory.chunk_of(sums.new_bucket(10, torch.float32, (0, 1))) is None
    assert sums._memory.chunk_of(sums.new_bucket(2**20, torch.float32, (0, 2))) is None
    assert sums._memory.chunk_of(sums.new_bucket(2**20, torch.float32, (0, 1))) is not None
