"""Scalars from sums: exact means over uneven slices, and seeds that are the gradients of the scalars."""

from __future__ import annotations

import torch

from rannc_backend.runtime.scalars import ScalarGraphs, SumSpec, total_over_ranks

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
    seeds = graphs.seeds({"count": torch.tensor(4)}, [2.0, 0.0], torch.device("cpu"))
    assert float(seeds["total"]) == 0.5 and float(seeds["square"]) == 0.25


def test_seeds_of_a_product_use_the_totals() -> None:
    graphs = scalar_graphs(linear=False)
    totals = {"total": torch.tensor(6.0, dtype=F64), "square": torch.tensor(3.0, dtype=F64), "count": torch.tensor(2)}
    seeds = graphs.seeds(totals, [1.0, 0.0], torch.device("cpu"))
    assert float(seeds["total"]) == 1.5 and float(seeds["square"]) == 3.0


def test_totals_keep_shape_and_dtype_and_count_absent_sums_as_zero() -> None:
    specs = (SumSpec(name="a", dtype=torch.float32, shape=(2,)), SumSpec(name="b", dtype=torch.int64, shape=()))
    totals = total_over_ranks({"a": torch.tensor([1.0, 2.0])}, specs, None, torch.device("cpu"))
    assert torch.equal(totals["a"], torch.tensor([1.0, 2.0])) and totals["b"].dtype == torch.int64
    assert int(totals["b"]) == 0
