"""Scalars from sums: exact means over uneven slices, and partial_gradients that are the gradients of the
scalars.
"""

from __future__ import annotations

import torch

from rannc_backend.runtime.step.scalars import ScalarGraphs, SumSpec, total_over_ranks

F64 = torch.float64


def scalar_graphs(linear: bool = True) -> ScalarGraphs:
    def epilogue(total: torch.Tensor, square: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = total / count
        return (mean + 0.5 * square / count, count) if linear else (mean * square, count)

    return ScalarGraphs(
        prologue=lambda labels: ((labels != -100).sum(),),
        prologue_inputs=("labels",),
        prologue_sums=(SumSpec(name="count", dtype=torch.int64, shape=()),),
        epilogue=epilogue,
        epilogue_inputs=("total", "square", "count"),
        partials=(SumSpec(name="total", dtype=F64, shape=()), SumSpec(name="square", dtype=F64, shape=())),
        linear=linear,
    )


def test_prologue_counts_labels_of_all_ranks() -> None:
    graphs = scalar_graphs()
    labels = torch.tensor([1, -100, 2])

    def other_rank(tensor: torch.Tensor) -> None:
        tensor += 5

    totals = graphs.prologue_totals({"labels": labels}, other_rank, torch.device("cpu"))
    assert totals["count"].dtype == torch.int64 and int(totals["count"]) == 7
    assert int(graphs.prologue_totals(None, other_rank, torch.device("cpu"))["count"]) == 5


def test_seeds_are_gradients_and_need_no_totals_when_linear() -> None:
    graphs = scalar_graphs()
    partial_gradients = graphs.partial_gradients({"count": torch.tensor(4)}, [2.0, 0.0], torch.device("cpu"))
    assert float(partial_gradients["total"]) == 0.5 and float(partial_gradients["square"]) == 0.25


def test_seeds_of_a_product_use_the_totals() -> None:
    graphs = scalar_graphs(linear=False)
    totals = {
        "total": torch.tensor(6.0, dtype=F64),
        "square": torch.tensor(3.0, dtype=F64),
        "count": torch.tensor(2),
    }
    partial_gradients = graphs.partial_gradients(totals, [1.0, 0.0], torch.device("cpu"))
    assert float(partial_gradients["total"]) == 1.5 and float(partial_gradients["square"]) == 3.0


def test_totals_keep_shape_and_dtype_and_count_absent_sums_as_zero() -> None:
    specs = (
        SumSpec(name="a", dtype=torch.float32, shape=(2,)),
        SumSpec(name="b", dtype=torch.int64, shape=()),
    )
    totals = total_over_ranks({"a": torch.tensor([1.0, 2.0])}, specs, None, torch.device("cpu"))
    assert torch.equal(totals["a"], torch.tensor([1.0, 2.0])) and totals["b"].dtype == torch.int64
    assert int(totals["b"]) == 0


def test_shares_are_added_in_float64_whatever_the_dtype_of_the_total() -> None:
    """A share of one beside a share of 2**24, which float32 cannot tell apart, is counted on every rank."""

    def other_rank(tensor: torch.Tensor) -> None:
        tensor += 1

    for dtype in (torch.float32, torch.float64, torch.int64):
        specs = (SumSpec(name="a", dtype=dtype, shape=()), SumSpec(name="b", dtype=dtype, shape=(2,)))
        sums = {"a": torch.tensor(2.0**24 + 1, dtype=F64)}
        totals = total_over_ranks(sums, specs, other_rank, torch.device("cpu"))
        assert totals["a"].item() == 2**24 + 2 and totals["b"].tolist() == [1, 1]
        assert all(total.dtype == dtype for total in totals.values())


def test_complex_totals_keep_both_parts_and_have_seeds() -> None:
    spec = SumSpec(name="total", dtype=torch.complex64, shape=(2,))
    other = SumSpec(name="count", dtype=torch.int64, shape=())
    share = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)

    def double(flat: torch.Tensor) -> None:
        flat *= 2

    totals = total_over_ranks(
        {"total": share.conj(), "count": torch.tensor(3)}, (other, spec), double, torch.device("cpu")
    )
    assert (
        totals["total"].tolist() == [2 - 4j, 6 + 8j]
        and totals["total"].dtype == torch.complex64
        and totals["count"].item() == 6
    )
    graphs = ScalarGraphs(
        prologue=None,
        prologue_inputs=(),
        prologue_sums=(),
        epilogue=lambda total: (total.abs().sum(),),
        epilogue_inputs=("total",),
        partials=(spec,),
        linear=False,
    )
    partial_gradients = graphs.partial_gradients(totals, [3.0], torch.device("cpu"))
    leaf = totals["total"].clone().requires_grad_()
    (3.0 * leaf.abs().sum()).backward()
    assert (
        leaf.grad is not None
        and torch.equal(partial_gradients["total"], leaf.grad)
        and partial_gradients["total"].abs().max() > 1
    )


def test_seeds_have_the_dtype_and_shape_of_their_partial_and_unused_ones_are_zero() -> None:
    specs = (
        SumSpec(name="used", dtype=torch.float32, shape=(3,)),
        SumSpec(name="unused", dtype=F64, shape=()),
    )
    counts = SumSpec(name="count", dtype=torch.int64, shape=())
    graphs = ScalarGraphs(
        prologue=None,
        prologue_inputs=(),
        prologue_sums=(),
        epilogue=lambda used, count: ((used * used).sum() / count, used[1]),
        epilogue_inputs=("used", "count"),
        partials=(*specs, counts),
        linear=False,
    )
    totals = {
        "used": torch.tensor([1.0, 2.0, 3.0]),
        "unused": torch.tensor(5.0, dtype=F64),
        "count": torch.tensor(4),
    }
    partial_gradients = graphs.partial_gradients(totals, [2.0, 10.0], torch.device("cpu"))
    assert (
        partial_gradients["used"].tolist() == [1.0, 12.0, 3.0]
        and partial_gradients["used"].dtype == torch.float32
    )
    assert (
        partial_gradients["unused"].item() == 0
        and partial_gradients["unused"].dtype == F64
        and partial_gradients["count"].item() == 0
    )
    assert not any(seed.requires_grad for seed in partial_gradients.values())
    # None of the totals was changed, or asked for a gradient.
    assert totals["used"].tolist() == [1.0, 2.0, 3.0] and not totals["used"].requires_grad
    assert [value.item() for value in graphs.scalars(totals)] == [3.5, 2.0]
