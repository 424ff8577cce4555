"""What plans count of gradients that are kept as rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rannc_backend.ir.block_graph import BlockGraph, ParameterUse
from rannc_backend.planner.blocks.formats import with_looked_up
from rannc_backend.planner.cost.formula import Formula
from rannc_backend.planner.plan_blocks import for_batch
from rannc_backend.planner.plan_model import analyze_model
from rannc_backend.planner.plan_parts import described_formats
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.planning_graphs import local_cpu

TABLE = ParameterUse(
    name="words", num_bytes=100 * 16, trainable=True, table_rows=100, looked_up=Formula.of_text("5*rows")
)
PLAIN = ParameterUse(name="head", num_bytes=64, trainable=True)


def _of_batch(rows: int, use: ParameterUse = TABLE, *, num_ranks: int = 2) -> ParameterUse:
    graph = BlockGraph(blocks=(), flows=(), parameters=(use, PLAIN))
    found, plain = for_batch(graph, rows, num_ranks).parameters
    assert plain == PLAIN
    return found


def test_rows_in_memory_and_between_ranks() -> None:
    use = _of_batch(4)  # 20 rows of 16 bytes, with a number of 8 bytes each
    assert use.sum_bytes == use.gradient_bytes == (2 * 20 + 20) * 24
    assert use.reduced_bytes == 20 * 24
    assert replace(use, sum_share=0.5).reduced_bytes == 20 * (8 + 8)
    assert use.held_bytes(2.0, offload=False) == 1600 + 2 * 1600 + use.sum_bytes


def test_what_ranks_exchange_is_bounded_by_their_tables() -> None:
    use = _of_batch(100)  # 500 rows
    assert use.sum_bytes == (2 * 500 + 100) * 24
    assert use.reduced_bytes == 2 * 100 * 24


@pytest.mark.parametrize(
    "use",
    [replace(TABLE, trainable=False), replace(TABLE, table_rows=0, looked_up=0)],
    ids=["frozen", "dense"],
)
def test_others_are_as_they_were(use: ParameterUse) -> None:
    found = _of_batch(4, use)
    assert found.sum_bytes == found.reduced_bytes == found.dense_sum_bytes == 1600 * use.trainable


def test_sums_in_a_wider_dtype() -> None:
    assert _of_batch(4, replace(TABLE, has_wide_sum=True)).sum_bytes == (2 * 20 + 20) * (32 + 8)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids) + self.words(ids[:, :2]).sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize(("of_tables", "looked_up"), [("sparse", 10 * (5 + 2)), ("dense", 0)])
def test_all_look_ups_of_a_model_count(of_tables: str, looked_up: int) -> None:
    config = Config()
    analysis = analyze_model(
        _Twice(), (torch.zeros(3, 5, dtype=torch.int64),), {}, cluster=local_cpu(2), config=config
    )
    graph = BlockGraph(
        blocks=(), flows=(), parameters=(ParameterUse(name="words.weight", num_bytes=16000, trainable=True),)
    )
    (use,) = for_batch(with_looked_up(graph, analysis, of_tables), 10, 2).parameters
    assert use.reduced_rows == looked_up
    assert use.table_rows == (1000 if looked_up else 0)
    formats = described_formats(replace(graph, parameters=(use,)), [], config)
    assert formats.num_row_gradients == (1 if looked_up else 0)
    assert formats.row_gradient_bytes == 0  # no stage has replicas
