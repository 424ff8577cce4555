"""The memory of runs of blocks, against the fullest moment of a backward played block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import sympy

from rannc_backend.cost.cluster import local_cpu
from rannc_backend.cost.pricing import BlockPrices
from rannc_backend.ir.block_graph import Block, BlockGraph, ParameterUse
from rannc_backend.partition.interval_costs import IntervalCosts

SAVED = (10.0, 50.0, 0.0, 20.0, 5.0)
WORKSPACE = (100.0, 3.0, 40.0, 7.0, 60.0)
GRADIENTS = (8, 0, 30, 1, 16)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A pricer that reads the tables above; twice as much with 2 rows."""

    holds_gradients: bool
    budgets: tuple[float, ...] = (1.0,)
    source: str = "test"

    def prices(self, block: Block, rows: list[int], budget: float) -> BlockPrices:
        scale = np.asarray(rows, dtype=float)
        return BlockPrices(
            forward_seconds=scale,
            backward_seconds=scale,
            saved_bytes=SAVED[block.index] * scale,
            workspace_bytes=WORKSPACE[block.index] * scale,
        )


def costs(*, holds_gradients: bool) -> IntervalCosts:
    zero = sympy.Integer(0)
    blocks = tuple(
        Block(
            index=index,
            structure=str(index),
            nodes=(f"n{index}",),
            modules=(),
            parameters=(f"p{index}",),
            updated_buffers=(),
            operators=(),
            saved_bytes=zero,
            output_bytes=zero,
            workspace_bytes=(),
        )
        for index in range(len(SAVED))
    )
    parameters = tuple(ParameterUse(name=f"p{index}", num_bytes=size, trainable=True) for index, size in enumerate(GRADIENTS))
    return IntervalCosts(
        graph=BlockGraph(blocks=blocks, flows=(), parameters=parameters),
        cluster=local_cpu(1),
        batch_rows=2,
        micro_batches=(1, 2),
        pricer=Prices(holds_gradients=holds_gradients),
        optimizer_factor=2.0,
    )


def fullest(begin: int, end: int, rows: int, *, holds_gradients: bool) -> float:
    """Bytes beside parameters and their optimizer state, gradient sums included, of one micro-batch."""
    moments = []
    for running in reversed(range(begin, end)):
        held = sum(GRADIENTS[running + 1 : end]) if holds_gradients else 0
        moments.append(rows * (sum(SAVED[begin : running + 1]) + WORKSPACE[running]) + held)
    return max(moments) + sum(GRADIENTS[begin:end])


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_workspace_is_that_of_the_fullest_moment(holds_gradients: bool) -> None:
    found = costs(holds_gradients=holds_gradients)
    for number, rows in ((1, 2), (2, 1)):
        tables = found.tables(number)
        for begin in range(len(SAVED)):
            for end in range(begin + 1, len(SAVED) + 1):
                states = 3 * sum(GRADIENTS[begin:end])  # parameters as large as gradients, optimizer state twice as large
                expected = states + fullest(begin, end, rows, holds_gradients=holds_gradients)
                place = (0, begin, end - begin - 1, 0)
                assert tables.fixed_bytes[place] + tables.flight_bytes[place] == pytest.approx(expected)
                parts = found.memory(begin, end, 1.0, number, 1)
                total = parts.parameters + parts.gradients + parts.optimizer + parts.activations + parts.buffers + parts.workspace
                assert total == pytest.approx(expected)


def test_all_recomputed_holds_what_one_micro_batch_saves() -> None:
    tables = costs(holds_gradients=False).tables(2)
    kept, nothing = (tables.fixed_bytes[i] + tables.flight_bytes[i] for i in (0, 1))
    assert (tables.flight_bytes[1] == 0).all() and nothing == pytest.approx(kept)
