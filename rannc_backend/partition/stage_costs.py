"""Numbers for the stage search: what any run of blocks costs on any number of replicas.

In: a `BlockGraph`, a `Cluster`, the rows of the batch, the schedule. Out: a `SearchProblem`, and the parts of one stage's
cost for the plan. Terms: an *interval* is a run of blocks [begin, end). The rows of a replica are those of the largest
micro-batch, divided by the replicas, rounded up.

What is counted. Seconds of a micro-batch: operators, adding parameter gradients up, receiving what earlier stages (or the
inputs) send, sending gradients of it back, returning outputs; a transfer is charged to the stage that reads. All-reduce: a
ring over the replicas; a parameter that other stages read too is priced as reduced over all ranks, which is the most that
it can be. Memory: parameters, gradients, optimizer state, returned outputs, the largest workspace of an operator, message
buffers; and for each micro-batch in flight the saved activations and received values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rannc_backend.cost.cluster import Cluster
from rannc_backend.cost.compute import operator_seconds
from rannc_backend.cost.expressions import evaluate
from rannc_backend.cost.memory import num_in_flight
from rannc_backend.cost.transfer import allreduce_seconds, message_seconds
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import RowCost, StageCost
from rannc_backend.partition.stage_search import MicroBatchTables, SearchProblem

Floats = NDArray[np.float64]
_ACCUMULATION_MOVES = 3  # adding a gradient to its sum reads both and writes one


@dataclass(slots=True, eq=False)
class StageCosts:
    """Costs of all intervals, computed once per number of rows. Immutable after construction but for the cache of tables."""

    graph: BlockGraph
    cluster: Cluster
    batch_rows: int
    micro_batches: tuple[int, ...]
    schedule: Literal["1f1b", "fill_drain"]
    optimizer_factor: float
    rows: NDArray[np.int64] = field(init=False)  # all numbers of rows of a replica that occur, ascending
    forward: Floats = field(init=False)  # [blocks + 1, rows], summed from the first block
    backward: Floats = field(init=False)
    saved: Floats = field(init=False)  # [blocks + 1, rows], summed
    returned: Floats = field(init=False)
    workspace: Floats = field(init=False)  # [begin, end, rows]
    received: Floats = field(init=False)
    received_gradients: Floats = field(init=False)  # of what is received, what has a gradient to be sent back
    sent: Floats = field(init=False)
    parameter_bytes: Floats = field(init=False)  # [begin, end]
    trainable_bytes: Floats = field(init=False)
    shared_bytes: Floats = field(init=False)  # trainable and read by blocks outside of the interval
    _tables: dict[int, MicroBatchTables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        devices = range(1, self.cluster.num_devices + 1)
        self.rows = np.array(
            sorted({self._replica_rows(number, count) for number in self.micro_batches for count in devices})
        )
        self._price_blocks()
        self._price_flows()
        self._size_parameters()

    def problem(self, memory_bytes: float, **fixed: object) -> SearchProblem:
        """The search over all stages; `fixed` are the forced numbers of `SearchProblem`."""
        return SearchProblem(
            num_blocks=len(self.graph.blocks),
            num_devices=self.cluster.num_devices,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            tables=self.tables,
            allreduce_seconds=self._allreduce_seconds(),
            memory_bytes=memory_bytes,
            **fixed,  # type: ignore[arg-type]
        )

    def tables(self, num_micro_batches: int) -> MicroBatchTables:
        """Tables [begin, end, replicas] for one number of micro-batches."""
        if num_micro_batches not in self._tables:
            self._tables[num_micro_batches] = self._build_tables(num_micro_batches)
        return self._tables[num_micro_batches]

    def stage_cost(self, begin: int, end: int, replicas: int, num_micro_batches: int, stages_to_end: int) -> StageCost:
        """The parts of what the search compared for one stage, `stages_to_end` counting it and those after it."""
        column = self._column(num_micro_batches, replicas)
        place = (begin, end, column)
        at_rows = self._row_cost(begin, end, column)
        in_flight = num_in_flight(self.schedule, num_micro_batches, stages_to_end)
        trainable = int(self.trainable_bytes[begin, end])
        returned = num_micro_batches * float(self.returned[end, column] - self.returned[begin, column])
        parts = {
            "parameter_bytes": int(self.parameter_bytes[begin, end]),
            "gradient_bytes": trainable,
            "optimizer_bytes": math.ceil(self.optimizer_factor * trainable),
            "activation_bytes": in_flight * at_rows.activation_bytes,
            "buffer_bytes": math.ceil(float(self._message_bytes()[place]) + returned),
            "workspace_bytes": at_rows.workspace_bytes,
        }
        return StageCost(
            forward_seconds=at_rows.forward_seconds,
            backward_seconds=at_rows.backward_seconds,
            transfer_seconds=float(self._transfer_seconds()[place]),
            allreduce_seconds=float(self._allreduce_seconds()[begin, end, replicas]),
            **parts,
            peak_bytes=sum(parts.values()),
            idle_share=0.0,
        )

    def row_costs(self, begin: int, end: int, replicas: int) -> tuple[RowCost, ...]:
        """One micro-batch at all numbers of rows that the numbers of micro-batches give a replica, ascending."""
        columns = sorted({self._column(number, replicas) for number in self.micro_batches})
        return tuple(self._row_cost(begin, end, column) for column in columns)

    def bytes_per_row(self, begin: int, end: int) -> tuple[float, float]:
        """Received per row, and sent back as gradients of it (of the most rows that occur)."""
        rows = float(self.rows[-1])
        return float(self.received[begin, end, -1]) / rows, float(self.received_gradients[begin, end, -1]) / rows

    def _row_cost(self, begin: int, end: int, column: int) -> RowCost:
        forward = float(self.forward[end, column] - self.forward[begin, column])
        backward = float(self.backward[end, column] - self.backward[begin, column])
        saved = float(self.saved[end, column] - self.saved[begin, column])
        return RowCost(
            rows=int(self.rows[column]),
            forward_seconds=max(forward, 0.0),
            backward_seconds=max(backward, 0.0),
            activation_bytes=math.ceil(max(saved + float(self.received[begin, end, column]), 0.0)),
            workspace_bytes=math.ceil(float(self.workspace[begin, end, column])),
        )

    def _replica_rows(self, num_micro_batches: int, replicas: int) -> int:
        largest_micro_batch = math.ceil(self.batch_rows / num_micro_batches)
        return math.ceil(largest_micro_batch / replicas)

    def _column(self, num_micro_batches: int, replicas: int) -> int:
        return int(np.searchsorted(self.rows, self._replica_rows(num_micro_batches, replicas)))

    def _price_blocks(self) -> None:
        blocks = self.graph.blocks
        operators = [operator for block in blocks for operator in block.operators]
        owner = np.repeat(np.arange(len(blocks)), [len(block.operators) for block in blocks])
        forward, backward = operator_seconds(operators, self.cluster.device, self.rows.tolist())
        sizes = {use.name: use.num_bytes for use in self.graph.parameters if use.trainable}
        moved = np.array([float(sum(sizes.get(name, 0) for name in block.parameters)) for block in blocks])
        accumulation = _ACCUMULATION_MOVES * moved / self.cluster.device.memory_bytes_per_second
        self.forward = _summed(_by_block(forward, owner, len(blocks)))
        self.backward = _summed(_by_block(backward, owner, len(blocks)) + accumulation[:, None])
        rows = self.rows.tolist()
        self.saved = _summed(evaluate([block.saved_bytes for block in blocks], rows))
        self.returned = _summed(evaluate([block.output_bytes for block in blocks], rows))
        largest = np.stack([evaluate(block.workspace_bytes, rows).max(axis=0, initial=0.0) for block in blocks])
        self.workspace = np.zeros((len(blocks), len(blocks) + 1, len(rows)))
        for begin in range(len(blocks)):
            self.workspace[begin, begin + 1 :] = np.maximum.accumulate(largest[begin:], axis=0)

    def _price_flows(self) -> None:
        num_blocks, flows = len(self.graph.blocks), self.graph.flows
        into = np.zeros((num_blocks, num_blocks + 1, len(flows)), dtype=bool)
        out = np.zeros_like(into)
        for index, flow in enumerate(flows):
            for begin in range(flow.producer + 1, num_blocks):
                first = next((block for block in flow.consumers if block >= begin), None)
                if first is None:
                    break
                into[begin, first + 1 :, index] = True
            if flow.producer >= 0:
                out[: flow.producer + 1, flow.producer + 1 : flow.consumers[-1] + 1, index] = True
        sizes = evaluate([flow.num_bytes for flow in flows], self.rows.tolist())
        has_gradient = np.array([flow.needs_grad for flow in flows], dtype=bool)
        self.received = into @ sizes
        self.received_gradients = into[:, :, has_gradient] @ sizes[has_gradient]
        self.sent = out @ sizes

    def _size_parameters(self) -> None:
        blocks = self.graph.blocks
        num_blocks = len(blocks)
        uses = {use.name: use for use in self.graph.parameters}
        readers: dict[str, list[int]] = {}
        for block in blocks:
            for name in block.parameters:
                readers.setdefault(name, []).append(block.index)
        shape = (num_blocks, num_blocks + 1)
        self.parameter_bytes, self.trainable_bytes, self.shared_bytes = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for name, places in readers.items():
            inside = np.zeros(shape, dtype=bool)
            for begin in range(places[-1] + 1):
                inside[begin, next(place for place in places if place >= begin) + 1 :] = True
            self.parameter_bytes[inside] += uses[name].num_bytes
            if uses[name].trainable:
                self.trainable_bytes[inside] += uses[name].num_bytes
                inside[: places[0] + 1, places[-1] + 1 :] = False  # all readers are in these intervals
                self.shared_bytes[inside] += uses[name].num_bytes

    def _allreduce_seconds(self) -> Floats:
        cluster = self.cluster
        result = np.zeros((*self.trainable_bytes.shape, cluster.num_devices + 1))
        own = self.trainable_bytes - self.shared_bytes
        shared = allreduce_seconds(cluster.group_link(cluster.num_devices), self.shared_bytes, cluster.num_devices)
        for replicas in range(1, cluster.num_devices + 1):
            result[:, :, replicas] = allreduce_seconds(cluster.group_link(replicas), own, replicas) + shared
        return result

    def _transfer_seconds(self) -> Floats:
        """[begin, end, rows]; a single device sends nothing."""
        if self.cluster.num_devices == 1:
            return np.zeros_like(self.received)
        link = self.cluster.message_link
        returned = self.returned[None, :, :] - self.returned[:-1, None, :]
        return sum(message_seconds(link, amount) for amount in (self.received, self.received_gradients, returned))

    def _message_bytes(self) -> Floats:
        """[begin, end, rows]: messages on their way (received values themselves count per micro-batch)."""
        return np.zeros_like(self.sent) if self.cluster.num_devices == 1 else 2 * self.sent + self.received_gradients

    def _build_tables(self, num_micro_batches: int) -> MicroBatchTables:
        counts = np.arange(self.cluster.num_devices + 1)
        columns = np.array([self._column(num_micro_batches, max(count, 1)) for count in counts])
        compute = self.forward + self.backward
        seconds = compute[None, :, columns] - compute[:-1, None, columns] + self._transfer_seconds()[:, :, columns]
        # Rows of the smallest micro-batch: every replica must get at least one.
        seconds[:, :, counts > self.batch_rows // num_micro_batches] = np.inf
        states = self.parameter_bytes + (1 + self.optimizer_factor) * self.trainable_bytes
        returned = num_micro_batches * (self.returned[None, :, columns] - self.returned[:-1, None, columns])
        saved = self.saved[None, :, columns] - self.saved[:-1, None, columns]
        return MicroBatchTables(
            seconds=np.maximum(seconds, 0.0),
            fixed_bytes=np.maximum(states[:, :, None] + returned + (self._message_bytes() + self.workspace)[:, :, columns], 0.0),
            flight_bytes=np.maximum(saved + self.received[:, :, columns], 0.0),
        )


def useful_micro_batches(batch_rows: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Numbers of micro-batches in [smallest, largest] worth trying: of those with equally large ones only the fewest.

    No more than the batch has rows.
    """
    chosen: dict[int, int] = {}
    for number in range(min(smallest, batch_rows), min(largest, batch_rows) + 1):
        chosen.setdefault(-(-batch_rows // number), number)
    return tuple(sorted(chosen.values()))


def _by_block(values: Floats, owner: Sequence[int] | NDArray[np.int64], num_blocks: int) -> Floats:
    result = np.zeros((num_blocks, values.shape[1]))
    np.add.at(result, owner, values)
    return result


def _summed(values: Floats) -> Floats:
    """Sums from the first block: element b is the sum before block b."""
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
