"""What a block costs at given numbers of rows: the prices that the stage search adds up.

In: `Block`s, a `Device`, and where they were made the blocks' partitions into forward and backward graphs.
Out: `BlockPrices`.

Terms. The *activation budget* is the part of the saved values that may be saved; 1.0 saves what makes
backward fastest, less makes backward compute the rest again. A block's *saved bytes* are those of values made
in it that are kept from forward to backward, be it by its own backward or by that of a later block; what a
stage receives from others is not among them. *Workspace* is what lies in memory beside that, and beside
parameters, while the block runs forward or backward. Backward seconds do not contain adding parameter
gradients up over micro-batches. An operator's seconds are a *roofline*: the longer of computing and moving, plus its launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import Block, OperatorCost
from rannc_backend.ir.size import Size
from rannc_backend.planner.cluster.cluster import Device
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.settings.choices import SEGMENTS_BUDGET

Floats = NDArray[np.float64]

ANALYTIC = "analytic"
BUDGETS = (1.0, 0.75, 0.5, 0.25)
"""The activation budgets at which blocks are partitioned; 0.0 and SEGMENTS_BUDGET are priced for whole stages, but for
what the user names."""
FINE_BUDGETS = (1.0, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Those of models that do not fit on one device, of which the fullest stage sets the pace."""


def priced_budgets(
    fixed: float | None, *, is_told: bool = False, is_large: bool = False
) -> tuple[float, ...]:
    """The budgets to price where the plan's is `fixed`, or (None) any. `is_told`: stages compute again what the user
    names, which blocks alone can tell. `is_large`: the model does not fit on one device.
    """
    if fixed is None:
        return FINE_BUDGETS if is_large else BUDGETS
    if is_told:
        return (1.0, SEGMENTS_BUDGET)
    return (1.0,) if fixed in (0.0, SEGMENTS_BUDGET, 1.0) else (1.0, fixed)


def replica_rows(batch_rows: int, num_micro_batches: int, replicas: int) -> int:
    """Rows that the replica with most rows computes of the largest micro-batch."""
    return math.ceil(math.ceil(batch_rows / num_micro_batches) / replicas)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPrices:
    """One block at one activation budget; every array is [len(rows)]. `inf` seconds: it does not fit at so
    many rows.
    """

    forward_seconds: Floats
    backward_seconds: Floats
    saved_bytes: Floats
    workspace_bytes: Floats
    weight_seconds: Floats  # of the backward, the second part
    kept_bytes: Floats  # that the second part needs of the first


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
    `forward_...` members hold. `saved_bytes` as above; `workspace_bytes`: its largest element counts. `weights`: of the
    backward, the second part, for which `kept_bytes` are kept.
    """

    forward: tuple[OperatorCost, ...]
    backward: tuple[OperatorCost, ...]
    weights: tuple[OperatorCost, ...] = ()
    kept_bytes: Size = 0
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
    largest workspace counts. `kept_bytes`: between the two parts of its backward.
    """

    saved_bytes: Size
    workspace_bytes: tuple[Size, ...]
    kept_bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """What the user says of how memory is counted: parts are rounded up to multiples of `granularity`; an optimizer's step
    needs `update_factor` bytes per byte of parameters that it updates; workspace is `transient_factor` times the two
    largest operators, 0: as graphs say.
    """

    granularity: int = 1
    update_factor: float = 0.0
    transient_factor: float = 0.0

    def rounded(self, num_bytes: Floats) -> Floats:
        """Bytes of parts, rounded up."""
        return (
            num_bytes if self.granularity == 1 else np.ceil(num_bytes / self.granularity) * self.granularity
        )

    def workspace(self, largest: Callable[[], Floats], traced: Floats, whole: Callable[[], Floats]) -> Floats:
        """Workspace where graphs say `traced`, and `whole` if nothing were computed again; `largest`: bytes of the two
        largest operators.
        """
        if not self.transient_factor:
            return traced
        return self.transient_factor * largest() + np.maximum(traced - whole(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryParts:
    """Bytes of one interval on one replica; `activations` of one micro-batch, and what is `kept` of one between the two
    parts of its backward. `elsewhere`: optimizer state that other replicas keep for this one. `update`: what an optimizer's
    step needs, when there are no activations.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    messages: float  # and communicators
    outputs: float
    workspace: float
    kept: float
    host: float = 0.0  # not on the device: parameters, gradients and optimizer state that are offloaded
    elsewhere: float = 0.0
    update: float = 0.0

    @property
    def buffers(self) -> float:
        """Messages, communicators and outputs."""
        return self.messages + self.outputs


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


def operator_seconds(
    operators: Sequence[OperatorCost], device: Device, rows: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward and backward seconds of each operator for each number of rows: two arrays [operators, rows]."""
    kinds = [(operator.dtype, operator.operator_class) for operator in operators]
    rate_of = {kind: device.rate(*kind) for kind in set(kinds)}
    moving_rate_of = {kind: device.memory_rate(kind[1]) for kind in set(kinds)}
    rates = np.array([rate_of[kind] for kind in kinds]).reshape(-1, 1)
    moving_rates = np.array([moving_rate_of[kind] for kind in kinds]).reshape(-1, 1)
    results = []
    for flops, moved, launches in (
        ("forward_flops", "forward_bytes", "num_forward_launches"),
        ("backward_flops", "backward_bytes", "num_backward_launches"),
    ):
        compute = evaluate([getattr(operator, flops) for operator in operators], rows) / rates
        memory = evaluate([getattr(operator, moved) for operator in operators], rows) / moving_rates
        counts = np.array(
            [[getattr(operator, launches)] for operator in operators], dtype=np.float64
        ).reshape(-1, 1)
        results.append(np.maximum(compute, memory) + counts * device.launch_seconds)
    return results[0], results[1]


def weight_seconds(operators: Sequence[OperatorCost], device: Device, rows: Sequence[int]) -> Floats:
    """[operators, rows]: of the backward, what gradients of parameters take; the other half of its bytes is moved for
    those of inputs.
    """
    rates = np.array([device.rate(each.dtype, each.operator_class) for each in operators]).reshape(-1, 1)
    moving = np.array([device.memory_rate(each.operator_class) for each in operators]).reshape(-1, 1)
    flops = evaluate([each.weight_flops for each in operators], rows)
    moved = evaluate([each.backward_bytes for each in operators], rows) / 2
    return np.where(flops > 0, np.maximum(flops / rates, moved / moving) + device.launch_seconds, 0.0)


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
            weight_seconds=np.minimum(weight_seconds(block.operators, self.device, rows), backward).sum(
                axis=0
            ),
            kept_bytes=evaluate([operator.kept_bytes for operator in block.operators], rows).sum(axis=0),
        )

    def _by_partition(self, partition: BlockPartition, rows: Sequence[int]) -> BlockPrices:
        forward, _ = operator_seconds(partition.forward, self.device, rows)
        backward, _ = operator_seconds(partition.backward, self.device, rows)
        weights, _ = operator_seconds(partition.weights, self.device, rows)
        return BlockPrices(
            forward_seconds=forward.sum(axis=0),
            backward_seconds=backward.sum(axis=0),
            saved_bytes=evaluate([partition.saved_bytes], rows)[0],
            workspace_bytes=evaluate(partition.workspace_bytes, rows).max(axis=0, initial=0.0),
            weight_seconds=np.minimum(weights.sum(axis=0), backward.sum(axis=0)),
            kept_bytes=evaluate([partition.kept_bytes], rows)[0],
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
        return replace(
            timed,
            saved_bytes=kept.saved_bytes,
            workspace_bytes=kept.workspace_bytes,
            kept_bytes=kept.kept_bytes,
        )
