"""Gradients to buckets and back on a CPU, against arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.kernels.gradient_bucket import BucketStatistics, aligned_offsets, read_bucket, write_bucket
from rannc_backend.kernels.gradient_views import write_views
from rannc_backend.kernels.gradient_writes import FIRST, LATER, write_gradients
from rannc_backend.kernels.record_table import CopyReport, KernelError

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("bucket_dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, torch.tensor(0.125)])
def test_buckets_hold_scaled_sums(bucket_dtype: torch.dtype, scale: float | torch.Tensor) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape).to(dtype) for shape, dtype in zip([(3, 5), (), (0,), (129,)], FLOATS, strict=True)]
    offsets, size = aligned_offsets([gradient.numel() for gradient in gradients], bucket_dtype)
    assert all(offset * bucket_dtype.itemsize % 128 == 0 for offset in offsets)
    bucket = torch.randn(size).to(bucket_dtype)
    before = bucket.double().clone()
    flags = [False, True, True, True]
    statistics = BucketStatistics.make(bucket)
    report = write_bucket(bucket, gradients, offsets, scale=scale, accumulate=flags, statistics=statistics)
    wanted, squares = before.clone(), 0.0
    for gradient, offset, added in zip(gradients, offsets, flags, strict=True):
        slot = slice(offset, offset + gradient.numel())
        wanted[slot] = gradient.double().view(-1) * float(scale) + (before[slot] if added else 0)
        squares += float((bucket[slot].double() ** 2).sum())
    eps = torch.finfo(bucket_dtype).eps
    torch.testing.assert_close(bucket.double(), wanted, rtol=2 * eps, atol=2 * eps)
    assert float(statistics.sum_of_squares) == pytest.approx(squares, rel=1e-6) and statistics.found_inf.tolist() == [0.0]
    assert report == CopyReport(bytes_copied=145 * bucket_dtype.itemsize, launches=4)
    back = [torch.full_like(gradient, float("nan")) for gradient in gradients]
    read_bucket(bucket, back, offsets, scale=2.0)
    for gradient, offset in zip(back, offsets, strict=True):
        exact = bucket[offset : offset + gradient.numel()].double().view(gradient.shape) * 2
        torch.testing.assert_close(gradient.double(), exact, rtol=torch.finfo(gradient.dtype).eps, atol=1e-6)


def test_float16_compression_scales_before_it_casts() -> None:
    # 2**-26 and 1e6 are nothing and infinity in float16; scaled, they are there.
    for value, scale in ((2.0**-26, 1024.0), (1e6, 1 / 1024)):
        bucket, gradient = torch.zeros(4, dtype=torch.float16), torch.full((4,), value)
        statistics = BucketStatistics.make(bucket)
        write_bucket(bucket, [gradient], [0], statistics=statistics)
        assert bucket[0] == (0.0 if value < 1 else float("inf")) and statistics.found_inf.tolist() == [float(value > 1)]
        write_bucket(bucket, [gradient], [0], scale=scale, statistics=statistics)
        assert statistics.found_inf.tolist() == [0.0]
        back = torch.zeros(4)
        read_bucket(bucket, [back], [0], scale=1 / scale)
        torch.testing.assert_close(back, gradient, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_flagged(value: float) -> None:
    bucket, gradient = torch.zeros(300), torch.ones(300)
    gradient[299] = value
    statistics = BucketStatistics.make(bucket)
    write_bucket(bucket, [gradient[:150], gradient[150:]], [0, 150], statistics=statistics)
    assert statistics.found_inf.tolist() == [1.0] and not bool(statistics.sum_of_squares.isfinite())
    write_bucket(bucket, [torch.full((300,), 1e30)], [0], statistics=statistics)
    assert statistics.found_inf.tolist() == [0.0]  # the squares overflow, the gradients are finite


def test_gradients_born_in_the_bucket_stay_where_they_are() -> None:
    bucket = torch.zeros(8)
    born = bucket[2:5]
    born.fill_(3.0)
    statistics = BucketStatistics.make(bucket)
    report = write_bucket(bucket, [born, torch.ones(3)], [2, 5], accumulate=[True, False], statistics=statistics)
    assert report == CopyReport(bytes_copied=12, bytes_without_copy=12, launches=1)
    assert bucket.tolist() == [0, 0, 3, 3, 3, 1, 1, 1] and float(statistics.sum_of_squares) == 30
    assert write_bucket(bucket, [born], [2], scale=0.5) == CopyReport(bytes_copied=12, launches=1)
    assert read_bucket(bucket, [born], [2]) == CopyReport(bytes_without_copy=12)
    assert bucket.tolist() == [0, 0, 1.5, 1.5, 1.5, 1, 1, 1]


def test_views_of_several_buckets_are_written_together() -> None:
    first, second = torch.zeros(8), torch.ones(2, 3)
    assert write_views([first[1:3], second], [torch.ones(2), torch.ones(3, 2).t()]) == CopyReport(56, 0, 3)
    write_views([first[1:3]], [torch.ones(2).bfloat16()], accumulate=True)
    assert first.tolist() == [0, 2, 2, 0, 0, 0, 0, 0] and bool((second == 1).all())
    assert write_views([], []) == CopyReport()
    with pytest.raises(KernelError, match="view 0 must be contiguous torch.float32 with 2 elements"):
        write_views([first], [torch.ones(2)])


def test_gradients_of_a_graph_reach_all_their_buckets() -> None:
    buckets = [torch.ones(2, 3), torch.ones(4), torch.ones(5, dtype=torch.float64)]
    gradients = [torch.full((2, 3), 2.0), torch.full((4,), 3.0).bfloat16(), torch.full((5,), 4.0)]
    for turn, wanted in ((FIRST, (2, 3, 4)), (LATER, (4, 6, 8))):
        write_gradients(buckets, gradients, turn)
        assert [bucket.unique().tolist() for bucket in buckets] == [[value] for value in wanted]


def test_what_does_not_fit_is_refused() -> None:
    bucket = torch.zeros(8)
    with pytest.raises(KernelError, match="gradient 0 is torch.int64"):
        write_bucket(bucket, [torch.arange(3)], [0])
    with pytest.raises(KernelError, match="gradient 1 needs elements 6 to 9 of a bucket of 8"):
        write_bucket(bucket, [torch.ones(3), torch.ones(3)], [0, 6])
    with pytest.raises(KernelError, match="gradient 0 is on meta, its bucket on cpu"):
        write_bucket(bucket, [torch.ones(3, device="meta")], [0])
    with pytest.raises(KernelError, match="2 gradients, but 1 offsets"):
        write_bucket(bucket, [torch.ones(1)] * 2, [0])
    with pytest.raises(KernelError, match="1 gradients, but 2 values of accumulate"):
        write_bucket(bucket, [torch.ones(1)], [0], accumulate=[True, False])
    with pytest.raises(KernelError, match="must be contiguous"):
        read_bucket(bucket, [torch.ones(2, 3).t()], [0])
    with pytest.raises(KernelError, match="a bucket is contiguous, floating"):
        write_bucket(torch.zeros(4, dtype=torch.int32), [torch.ones(2)], [0])


def through_operators(bucket: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    results, back = torch.zeros(2), torch.empty(3)
    torch.ops.rannc.write_bucket(bucket, [gradient * 2, gradient.t()], [0, 6], 0.5, [True, False], [results])
    torch.ops.rannc.read_bucket(bucket, [back], [3], 10.0, [False])
    return [bucket * 1, results, back]


def test_operators_stay_in_graphs_and_keep_their_order() -> None:
    gradient = torch.arange(6.0).view(2, 3)
    graph = make_fx(through_operators)(torch.ones(12), gradient)
    called = [node.target for node in graph.graph.nodes]
    assert torch.ops.rannc.write_bucket.default in called and torch.ops.rannc.read_bucket.default in called
    compiled = torch.compile(through_operators, backend="aot_eager", fullgraph=True)
    bucket = torch.ones(12)
    for got, wanted in zip(compiled(bucket, gradient), through_operators(torch.ones(12), gradient), strict=True):
        assert torch.equal(got, wanted)
    assert bucket.tolist() == [1, 2, 3, 4, 5, 6, 0, 1.5, 0.5, 2, 1, 2.5]


def test_the_schemas_say_what_is_written() -> None:
    bucket = torch.zeros(12)
    torch.library.opcheck(torch.ops.rannc.write_bucket.default, (bucket, [torch.ones(3)], [2], 0.5, [True], [torch.zeros(2)]))
    torch.library.opcheck(torch.ops.rannc.read_bucket.default, (bucket, [torch.ones(3)], [2], 0.5, [True]))
