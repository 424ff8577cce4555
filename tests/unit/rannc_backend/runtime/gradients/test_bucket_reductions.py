"""Sums of buckets over ranks: in which dtype, with which scale, in which memory, over which communicator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions, SumFormat
from rannc_backend.settings.options import Config

RANKS = (0, 1)


class Doubling:
    """Stands for a transport, or for sums in shared memory: two ranks with the same buckets."""

    def __init__(self, *, shared: bool = False) -> None:
        self.summed: list[tuple[torch.dtype, int]] = []
        self.made: list[torch.dtype] = []
        self.addresses: list[int] = []
        self.prepared: list[dict[str, Any]] = []
        self.shared = shared

    def prepare(self, **named: Any) -> None:
        self.prepared.append(named)

    def share(self, groups: Any) -> Any:
        return SimpleNamespace(reduce=self.allreduce, new_bucket=self.new_bucket)

    def new_bucket(self, numel: int, dtype: torch.dtype, ranks: Any) -> torch.Tensor:
        self.made.append(dtype)
        return torch.zeros(numel, dtype=dtype)

    def allreduce(self, tensor: torch.Tensor, ranks: Any, takers: Any = (), communicator: int = 0) -> Any:
        self.summed.append((tensor.dtype, communicator))
        self.addresses.append(tensor.data_ptr())
        return SimpleNamespace(wait=lambda limit: tensor.mul_(2))


def reductions(transport: Doubling, **named: Any) -> BucketReductions:
    return BucketReductions.of(transport, [RANKS], shared_memory=transport.shared, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [False, True])
def test_a_bucket_is_scaled_rounded_summed_and_scaled_back(shared: bool) -> None:
    transport = Doubling(shared=shared)
    sums = reductions(transport, sum_format=SumFormat(dtype=torch.bfloat16, scale=3.0))
    values = torch.tensor([1.0, 1 + 2**-9, -7.3, 0.0])
    for _ in range(3):
        bucket = values.clone()
        work = sums.start(bucket, RANKS)
        assert torch.equal(bucket, values), "nothing is there before the wait"
        work.wait()
        expected = (values * 3).to(torch.bfloat16).float() * 2 / 3
        assert torch.equal(bucket, expected)
        work.wait()
        assert torch.equal(bucket, expected), "a second wait changes nothing"
        del work
    assert transport.summed == [(torch.bfloat16, 0)] * 3
    assert transport.made == [torch.bfloat16] * shared, "what is shared is used again"
    spec = BucketSpec(ranks=RANKS, dtype=torch.float32, device=torch.device("cpu"), numel=4, names=())
    assert sums.new_buffer(spec).dtype == torch.float32 and torch.float32 not in transport.made


def test_two_sums_under_way_have_memory_of_their_own() -> None:
    sums = reductions(Doubling(shared=True), sum_format=SumFormat(dtype=torch.float16))
    buckets = [torch.full((4,), float(number)) for number in range(3)]
    works = [sums.start(bucket, RANKS) for bucket in buckets]
    for work in works:
        work.wait()
    assert [bucket[0].item() for bucket in buckets] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)  # 16 bits are not wider; complex numbers are left alone
def test_what_is_not_wider_travels_as_it_is(dtype: torch.dtype) -> None:
    transport = Doubling()
    sums = reductions(transport, sum_format=SumFormat(dtype=torch.bfloat16, scale=128.0))
    bucket = torch.ones(4, dtype=dtype)
    sums.start(bucket, RANKS).wait()
    assert transport.addresses == [bucket.data_ptr()], "it is not copied"
    assert transport.summed == [(dtype, 0)] and torch.equal(bucket, torch.full((4,), 2.0, dtype=dtype))


def test_only_those_that_take_a_sum_get_it() -> None:
    for rank in RANKS:
        sums = reductions(Doubling(), rank=rank, sum_format=SumFormat(dtype=torch.float16))
        bucket = torch.ones(2)
        sums.start(bucket, RANKS, (1,)).wait()
        assert bucket[0].item() == (2.0 if rank == 1 else 1.0)


def test_buckets_of_the_same_ranks_go_to_communicators_in_turn() -> None:
    transport = Doubling()
    sums = reductions(transport, num_communicators=3)
    assert transport.prepared == [{"groups": [RANKS], "num_communicators": 3}]
    for ranks in (RANKS, RANKS, (0, 1, 2), RANKS, RANKS):
        sums.start(torch.ones(2), ranks).wait()
    assert [number for _, number in transport.summed] == [0, 1, 0, 2, 0]


def test_formats_of_the_options() -> None:
    assert SumFormat.of(Config()).of_bucket(torch.float64) == torch.float64
    found = SumFormat.of(Config(gradient_dtype="fp16", gradient_scale=8.0))
    assert (found.dtype, found.scale) == (torch.float16, 8.0)


@pytest.mark.parametrize("shared", [False, True])
def test_only_shared_memory_of_buckets_stays_from_step_to_step(shared: bool) -> None:
    transport = Doubling(shared=shared)
    sums = reductions(transport, sum_format=SumFormat(dtype=torch.bfloat16))
    for num_rows in (2, 3, 5):
        sums.start(torch.ones(num_rows, 4), RANKS).wait()
    assert not sums.pool.tensors() and not transport.made, "rows are of another number in each step"
    for _ in range(2):
        sums.start(torch.ones(4), RANKS).wait()
    assert len(sums.pool.tensors()) == len(transport.made) == int(shared)
