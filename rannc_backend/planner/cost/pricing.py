"""What a block costs at given numbers of rows: the prices that the stage search adds up.

In: `Block`s, a `Device`, and where they were made the blocks' partitions into forward and backward graphs.
Out: `BlockPrices`.

Terms. The *activation budget* is the part of the saved values that may be saved; 1.0 saves what makes
backward fastest, less makes backward compute the rest again. A block's *saved bytes* are those of values made
in it that are kept from forward to backward, be it by its own backward or by that of a later block; what a
stage receives from others is not among them. *Workspace* is what lies in memory beside that, and beside
parameters, while the block runs forward or backward. Backward seconds do not contain adding parameter
gradients up over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import Block, OperatorCost
from rannc_backend.ir.size import Size
from rannc_backend.planner.cluster.cluster import Device
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.roofline import operator_seconds

Floats = NDArray[np.float64]

ANALYTIC = "analytic"
BUDGETS = (1.0, 0.75, 0.5, 0.25)
"""The activation budgets at which blocks are partitioned; 0.0 is priced for whole stages."""


def priced_budgets(fixed: float | None, choices: tuple[float, ...] = BUDGETS) -> tuple[float, ...]:
    """The budgets to price where the plan's is `fixed`, or (None) one of `choices`."""
    return choices if fixed is None else tuple(dict.fromkeys((1.0, fixed or 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPrices:
    """One block at one activation budget; every array is [len(rows)]. `inf` seconds: it does not fit at so
    many rows.
    """

    forward_seconds: Floats
    backward_seconds: Floats
    saved_bytes: Floats
    workspace_bytes: Floats


class BlockPricer(Protocol):
    """Prices of blocks; asked often, so implementations remember what they have computed."""

    @property
    def budgets(self) -> tuple[float, ...]:
        """Activation budgets that it can price, 1.0 first, descending."""
        ...

    @property
    def holds_gradients(self) -> bool:
        """Whether a stage's backward hands its parameters' gradients over at its end: all of them then lie in
        memory beside the sums that they are added to. If not, each is part of its block's workspace."""
        ...

    @property
    def source(self) -> str:
        """Where the prices come from, for people: "analytic" or "measured ..."."""
        ...

    def prices(self, block: Block, rows: Sequence[int], budget: float) -> BlockPrices:
        """What `block` costs at each number of rows. AssertionError: `budget` is not one of `budgets`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPartition:
    """A block's forward and backward graphs at one activation budget, as far as they cost something.

    `forward` and `backward` are the graphs' operators, what backward computes again among them; their
    `forward_...` members hold. `saved_bytes` as above; `workspace_bytes`: its largest element counts.
    """

    forward: tuple[OperatorCost, ...]
    backward: tuple[OperatorCost, ...]
    saved_bytes: Size
    workspace_bytes: tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Blocks [begin, end) as one stage at an activation budget above 0; `rows`: those of a micro-batch on one
    replica, at most.
    """

    begin: int
    end: int
    budget: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage keeps of one micro-batch, without what it receives, and what it needs beside that; the
    largest workspace counts.
    """

    saved_bytes: Size
    workspace_bytes: tuple[Size, ...]


class WholeStages(Protocol):
    """Where the memory of stages comes from that is known better than by their blocks."""

    def memory(self, stages: Sequence[Interval]) -> list[StageMemory | None]:
        """That of each stage of a plan; None where the sum over the blocks must do."""
        ...


class Partitions(Protocol):
    """Where partitions come from."""

    @property
    def budgets(self) -> tuple[float, ...]:
        """Activation budgets at which there are partitions, 1.0 first, descending."""
        ...

    def partition(self, block: Block, budget: float) -> BlockPartition | None:
        """The block's partition at one of `budgets`; None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class NoPartitions:
    """Where no block is traced. See `Partitions`."""

    budgets: tuple[float, ...] = BUDGETS[:1]

    def partition(self, block: Block, budget: float) -> BlockPartition | None:
        """None."""
        return None


@dataclass(slots=True, kw_only=True, eq=False)
class AnalyticPricer:
    """Roofline of each operator on `device`.

    A block without a partition is priced by its own operators and by the rules of planner/cost/memory.py,
    equally at all budgets.
    """

    device: Device
    partitions: Partitions = NoPartitions()
    holds_gradients: bool = False
    source: str = ANALYTIC
    _known: dict[tuple[int, tuple[int, ...], float], BlockPrices] = field(init=False, default_factory=dict)

    @property
    def budgets(self) -> tuple[float, ...]:
        """See `BlockPricer`."""
        return self.partitions.budgets

    def prices(self, block: Block, rows: Sequence[int], budget: float) -> BlockPrices:
        """See `BlockPricer`."""
        assert budget in self.budgets, f"no prices at the activation budget {budget}"
        key = (block.index, tuple(rows), budget)
        if key not in self._known:
            partition = self.partitions.partition(block, budget)
            self._known[key] = (
                self._by_rules(block, rows) if partition is None else self._by_partition(partition, rows)
            )
        return self._known[key]

    def _by_rules(self, block: Block, rows: Sequence[int]) -> BlockPrices:
        forward, backward = operator_seconds(block.operators, self.device, rows)
        return BlockPrices(
            forward_seconds=forward.sum(axis=0),
            backward_seconds=backward.sum(axis=0),
            saved_bytes=evaluate([block.saved_bytes], rows)[0],
            workspace_bytes=evaluate(block.workspace_bytes, rows).max(axis=0, initial=0.0),
        )

    def _by_partition(self, partition: BlockPartition, rows: Sequence[int]) -> BlockPrices:
        forward, _ = operator_seconds(partition.forward, self.device, rows)
        backward, _ = operator_seconds(partition.backward, self.device, rows)
        return BlockPrices(
            forward_seconds=forward.sum(axis=0),
            backward_seconds=backward.sum(axis=0),
            saved_bytes=evaluate([partition.saved_bytes], rows)[0],
            workspace_bytes=evaluate(partition.workspace_bytes, rows).max(axis=0, initial=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricerOfTwo:
    """Blocks at two lengths: `seconds` prices those that are timed, `timed` by index; `kept` those that memory is
    counted of.
    """

    seconds: BlockPricer
    timed: tuple[Block, ...]
    kept: BlockPricer

    @property
    def budgets(self) -> tuple[float, ...]:
        """See `BlockPricer`."""
        return self.seconds.budgets

    @property
    def holds_gradients(self) -> bool:
        """See `BlockPricer`."""
        return self.kept.holds_gradients

    @property
    def source(self) -> str:
        """See `BlockPricer`."""
        return self.seconds.source

    def prices(self, block: Block, rows: Sequence[int], budget: float) -> BlockPrices:
        """See `BlockPricer`."""
        timed = self.seconds.prices(self.timed[block.index], rows, budget)
        kept = self.kept.prices(block, rows, budget)
        return replace(timed, saved_bytes=kept.saved_bytes, workspace_bytes=kept.workspace_bytes)
