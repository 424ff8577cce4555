"""Numbers for the stage search: what any run of blocks costs on any number of replicas.

In: a `BlockGraph`, a `Cluster`, prices of blocks (planner/cost/pricing.py), the rows of the batch. Out: the
tables of a `SearchProblem`, and the parts of one stage's cost for the plan. Terms: an *interval* is a run of
blocks, given by its first block and its length; arrays over intervals are [blocks, most blocks in a stage].
The rows of a replica are those of the largest micro-batch, divided by the replicas, rounded up.

What is counted. Seconds: the blocks', and adding parameter gradients up. Messages: what an interval reads of
earlier blocks and of the batch, all in one message from the stage before, and the gradients of what earlier
blocks made back. Memory: parameters, gradients, optimizer state, returned outputs, workspace, message
buffers, communicators; and for each micro-batch in flight what the blocks save and what was received.
Workspace is what the fullest moment needs beyond the rest: while a block runs, the blocks behind it have not
saved yet or have let go of it again, but may hold their parameters' gradients
(`BlockPricer.holds_gradients`). At the activation budget 0.0 a stage saves nothing of its own, runs its
forward again before backward and then holds what budget 1.0 saves of one micro-batch; at SEGMENTS_BUDGET it does
so segment by segment (planner/cost/segments.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np

from rannc_backend.ir.block_graph import Block, BlockGraph
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.output_bytes import OutputBytes
from rannc_backend.planner.cost.pricing import (
    ANALYTIC,
    BlockPricer,
    BlockPrices,
    MemoryParts,
    MemoryRules,
    StageMemory,
    replica_rows,
)
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.planner.cost.transfer import useful_replicas
from rannc_backend.planner.cost.update_shares import SharedInLane, divided_among, update_shares
from rannc_backend.planner.search.over_intervals import (
    FlowSums,
    LargestOperators,
    ParameterSums,
    WorkFloor,
    ends_of,
    least_work,
    messages_of,
    messages_over,
    over,
    received_bytes,
    seconds_over,
    sent_bytes,
    up_to,
    workspace_of,
    workspace_over,
)
from rannc_backend.planner.search.problem import Floats, Ints, MicroBatchTables
from rannc_backend.settings.choices import SEGMENTS_BUDGET

_ACCUMULATION_MOVES = 3  # adding a gradient to its sum reads both and writes one
# of weights, their states and saved values: scalars, counters, and what an allocator rounds up (half of it
# was seen)
_SMALL_THINGS = 0.01
NO_BUDGET = 0.0  # everything is recomputed but what the stage receives


@dataclass(slots=True, eq=False, kw_only=True)
class IntervalCosts:
    """Costs of all intervals whose parameters, gradients and optimizer state take at most `most_bytes`.

    `offload`: parameters, their gradients and optimizer state lie on the host, but for a step's copies and sums.
    `update_groups`: of the replicas of a stage, one of which in each updates a parameter; None: all replicas update
    all. `replica_counts`: counts that must be among those tried. `only_budget`: the activation budget of all
    stages, None where it is chosen, `some_keep_all`: but for those that keep all; one that the pricer does not know is
    priced as the next larger. Immutable but for the cache of tables.
    """

    graph: BlockGraph
    cluster: Cluster
    batch_rows: int
    micro_batches: tuple[int, ...]
    pricer: BlockPricer
    optimizer_factor: float
    most_bytes: float = float("inf")
    update_groups: int | None = None
    offload: bool = False
    replica_counts: tuple[int, ...] = ()
    only_budget: float | None = None
    some_keep_all: bool = False
    rules: MemoryRules = MemoryRules()
    outputs: OutputBytes = field(init=False)
    segments: Segments = field(init=False)
    max_length: int = field(init=False)
    sums: ParameterSums = field(init=False)
    shared: SharedInLane = field(init=False)
    _update_shares: Floats | None = field(init=False, default=None)  # [L, N, divisors]
    _divisors: Ints = field(init=False)  # numbers of replicas that divide updates, ascending
    _alike: tuple[Block, ...] = field(init=False)  # by block, the first of its structure
    _accumulation: Floats = field(init=False)  # [L], seconds
    _held_gradients: Floats = field(
        init=False
    )  # [L], bytes of parameter gradients that stay until the stage's backward ends
    _rows: Ints = field(init=False)  # all numbers of rows of a replica that occur, ascending
    _prices: dict[float, list[BlockPrices]] = field(init=False)  # budget -> by block, over _rows
    _flows: FlowSums = field(init=False)
    _returned: Floats = field(init=False)  # [L, rows]
    _tables: dict[int, MicroBatchTables] = field(init=False, default_factory=dict)
    _floors: dict[int, WorkFloor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs = OutputBytes(
            graph=self.graph, batch_rows=self.batch_rows, num_devices=self.cluster.num_devices
        )
        self.segments = Segments(self.graph, fused=self.pricer.holds_gradients)
        counts = {number: self.counts(number) for number in self.micro_batches}
        self._divisors = np.unique(np.concatenate([[1], *map(self._divisor, counts.values())]))
        self._size_parameters()
        rows = {
            self.replica_rows(number, count) for number, each in counts.items() for count in each.tolist()
        }
        self._rows = np.array(sorted(rows), dtype=np.int64)
        self._price_blocks()
        has_kept = SEGMENTS_BUDGET in self.budgets and not self._is_told
        self._flows = FlowSums.of(
            self.graph, self._rows.tolist(), self.max_length, self.segments.kept if has_kept else ()
        )

    @property
    def budgets(self) -> tuple[float, ...]:
        """Activation budgets in the order of the tables."""
        if self.only_budget is not None:
            return tuple(dict.fromkeys((self.only_budget, *((1.0,) if self.some_keep_all else ()))))
        return tuple(dict.fromkeys((*self.pricer.budgets, SEGMENTS_BUDGET, NO_BUDGET)))

    def traced_budget(self, budget: float) -> float:
        """The activation budget at which a stage's graph is made: one that recomputes everything runs its
        forward as if to keep all.
        """
        return self.pricer.budgets[0] if budget == NO_BUDGET else budget

    def _priced_as(self, budget: float) -> float | None:
        """The pricer's budget that stands for `budget`; None where the stage recomputes everything."""
        if budget in (NO_BUDGET, SEGMENTS_BUDGET):
            return budget or None
        return min(known for known in self.pricer.budgets if known >= budget)

    def replica_rows(self, num_micro_batches: int, replicas: int) -> int:
        """Rows that the replica with most rows computes of the largest micro-batch."""
        return replica_rows(self.batch_rows, num_micro_batches, replicas)

    def counts(self, num_micro_batches: int) -> Ints:
        """Replica counts worth trying: see `useful_replicas`."""
        most = min(self.cluster.num_devices, self.batch_rows // num_micro_batches)
        rows_of = partial(self.replica_rows, num_micro_batches)
        return useful_replicas(self.cluster, most, rows_of, self.replica_counts)

    def tables(self, num_micro_batches: int, max_length: int | None = None) -> MicroBatchTables:
        """Tables for one number of micro-batches, of intervals of at least `max_length` blocks (None: of
        all).
        """
        length = min(max_length or self.max_length, self.max_length)
        known = self._tables.get(num_micro_batches)
        if known is None or known.forward.shape[1] < length:
            self._tables[num_micro_batches] = known = self._build_tables(num_micro_batches, length)
        return up_to(length, known)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process computes the tables that it needs."""
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return partial(IntervalCosts, **given), ()

    def work_floor(self, num_micro_batches: int) -> WorkFloor:
        """See `SearchProblem`: seconds of a stage are at least the sums of its blocks' with the budgets that
        are fastest for each.
        """
        if num_micro_batches not in self._floors:
            self._floors[num_micro_batches] = self._work_floor(num_micro_batches)
        return self._floors[num_micro_batches]

    def _work_floor(self, num_micro_batches: int) -> WorkFloor:
        counts = self.counts(num_micro_batches)
        columns = self._columns(num_micro_batches, counts)
        whole = self._prices[self.pricer.budgets[0]]
        work = least_work(counts, columns, whole, list(self._prices.values()), self._alike)
        # Gradients are added up by every replica, so by one at least.
        return WorkFloor(
            work=work + self._accumulation,
            held_bytes=self._held_bytes(),
            most_replicas=int(counts.max(initial=1)),
        )

    def _columns(self, num_micro_batches: int, counts: Ints) -> Ints:
        """Where the rows of each replica count are among all rows."""
        rows = [self.replica_rows(num_micro_batches, int(count)) for count in counts]
        return np.searchsorted(self._rows, rows)

    def prices(
        self, begin: int, end: int, budget: float, rows: Sequence[int], traced: StageMemory | None = None
    ) -> BlockPrices:
        """Prices of an interval at any numbers of rows of a replica; `saved_bytes` without what is received.

        `traced`: what the interval keeps and needs as one stage, in place of the sum over its blocks.
        """
        first = self.pricer.budgets[0]
        whole = [
            self.pricer.prices(self._alike[block.index], rows, first)
            for block in self.graph.blocks[begin:end]
        ]
        parts, priced_as = whole, self._priced_as(budget)
        leaving, again = np.zeros(len(rows)), np.zeros((end - begin, len(rows)))
        if priced_as == SEGMENTS_BUDGET:
            everything = [self.pricer.prices(block, rows, first) for block in self._alike]
            parts = self.segments.prices(everything, rows, self._told_prices(rows))[begin:end]
            if self._is_told:
                again = self.segments.told_again(everything, np.array(begin), np.arange(begin, end))
            else:
                leaving = self.segments.leaving(begin, end, rows)
        elif priced_as not in (first, None):
            parts = [
                self.pricer.prices(self._alike[block.index], rows, priced_as)
                for block in self.graph.blocks[begin:end]
            ]
        forward = np.sum([part.forward_seconds for part in whole], axis=0)
        backward = (
            np.sum([part.backward_seconds for part in parts], axis=0) + self._accumulation[begin:end].sum()
        )
        saved = np.sum([part.saved_bytes for part in parts], axis=0) - leaving
        held = self._held_gradients[begin:end]
        workspace = self.rules.workspace(
            lambda: LargestOperators.of(self._alike[begin:end], rows).of_all(),
            workspace_of(parts, held, again),
            lambda: workspace_of(whole, held, 0.0),
        )
        kept = np.sum([part.kept_bytes for part in whole], axis=0)
        if begin == 0:
            kept = self._kept_of_first(end, rows, np.zeros_like(saved) if priced_as is None else saved)
        if traced is not None:
            saved, kept = evaluate([traced.saved_bytes, traced.kept_bytes], rows)
            needed = evaluate(traced.workspace_bytes, rows).max(axis=0, initial=0.0)
            # What was measured may hold what no graph shows: memory of a library's own.
            needed = needed if self.pricer.source == ANALYTIC else np.maximum(needed, workspace)
            workspace = workspace if self.rules.transient_factor else needed
        workspace = workspace + _SMALL_THINGS * (self._held_bytes()[begin, end - begin - 1] + saved)
        if priced_as is None:
            backward, workspace, saved = backward + forward, workspace + saved, np.zeros_like(saved)
        return BlockPrices(
            forward_seconds=forward,
            backward_seconds=backward,
            saved_bytes=saved,
            workspace_bytes=workspace,
            weight_seconds=np.sum([part.weight_seconds for part in whole], axis=0)
            + self._accumulation[begin:end].sum(),
            kept_bytes=kept,
        )

    def _kept_of_first(self, end: int, rows: Sequence[int], saved: Floats) -> Floats:
        """[rows]: what a first stage keeps between the two parts of a backward: all that forward saved, and the gradients
        of what it sent. Nobody waits for gradients of its inputs, so its first part computes nothing.
        """
        return saved + self.message_bytes(0, end, rows)[0] + sent_bytes(self.graph, 0, end, rows)[1]

    def message_bytes(
        self, begin: int, end: int, rows: Sequence[int], *, on_wire: bool = False
    ) -> tuple[Floats, Floats]:
        """What a replica with so many rows receives of one micro-batch, and the gradients that it gives back:
        arrays [rows]. ``on_wire``: as they travel.
        """
        return received_bytes(self.graph, begin, end, rows, on_wire=on_wire)

    def memory(
        self,
        begin: int,
        end: int,
        budget: float,
        num_micro_batches: int,
        replicas: int,
        *,
        num_in_flight: int = 0,
        traced: StageMemory | None = None,
    ) -> MemoryParts:
        """What the tables' bytes are made of; no more than those say where it is known how many micro-batches
        are in flight.

        `traced` as in `prices`.
        """
        rows = [self.replica_rows(num_micro_batches, replicas)]
        prices = self.prices(begin, end, budget, rows, traced)
        received, place = self.message_bytes(begin, end, rows)[0], (begin, end - begin - 1)
        # Where all micro-batches are in flight there is none to receive ahead.
        is_ahead = num_micro_batches > num_in_flight
        messages = messages_of(
            self.graph, self.cluster, (begin, end), rows, num_micro_batches, is_ahead=is_ahead
        )
        messages += self.shared.communicators(begin, end, replicas)
        messages += float(self.sums.rounded[place]) * (replicas > 1)
        updated = float(self._updated_bytes(np.array([replicas]))[place][0])
        outputs = self.outputs.of_stage(range(begin, end), num_micro_batches, replicas)
        sizes = [self.sums.parameters[place], self.sums.gradients[place], self._device_factor * updated]
        sizes += [prices.saved_bytes[0] + received[0], messages, outputs, prices.workspace_bytes[0]]
        sizes += [prices.kept_bytes[0], self._update_factor * updated]
        rounded = [float(size) for size in self.rules.rounded(np.array(sizes, dtype=float))]
        return MemoryParts(
            parameters=rounded[0],
            gradients=rounded[1],
            optimizer=rounded[2],
            elsewhere=self._device_factor * max(0.0, float(self.sums.trainable[place]) - updated),
            host=float(self.sums.host[place]) + (self.optimizer_factor - self._device_factor) * updated,
            activations=rounded[3],
            messages=rounded[4],
            outputs=rounded[5],
            workspace=rounded[6],
            kept=rounded[7],
            update=rounded[8],
        )

    def workspace_bytes(self, num_micro_batches: int, begin: int, end: int, replicas: int) -> Floats:
        """[budgets]: the workspace in `fixed_bytes` of an interval."""
        rows = self.replica_rows(num_micro_batches, replicas)
        column = int(np.searchsorted(self._rows, rows))
        first, result = self.pricer.budgets[0], np.empty(len(self.budgets))
        for index, budget in enumerate(self.budgets):
            priced_as = self._priced_as(budget)
            prices = self._prices[first if priced_as is None else priced_as][begin:end]
            again: Floats | float = 0.0
            if priced_as == SEGMENTS_BUDGET and self._is_told:
                places = np.array(begin), np.arange(begin, end)
                again = self.segments.told_again(self._prices[first], *places)
            held, everything = self._held_gradients[begin:end], self._prices[first][begin:end]
            needed = self.rules.workspace(
                lambda: LargestOperators.of(self._alike[begin:end], [rows]).of_all(),
                workspace_of(prices, held, again),
                partial(workspace_of, everything, held, 0.0),
            )[column]
            kept = sum(price.saved_bytes[column] for price in prices)
            if priced_as == SEGMENTS_BUDGET and not self._is_told:
                kept = max(0.0, kept - float(self.segments.leaving(begin, end, [rows])[0]))
            needed += _SMALL_THINGS * (self._held_bytes()[begin, end - begin - 1] + kept)
            result[index] = needed + kept if priced_as is None else needed
        return self.rules.rounded(result)

    @property
    def _is_told(self) -> bool:
        """Whether stages with segments compute again what the user names."""
        return SEGMENTS_BUDGET in self.pricer.budgets

    def _told_prices(self, rows: Sequence[int]) -> list[BlockPrices] | None:
        found = [self.pricer.prices(block, rows, SEGMENTS_BUDGET) for block in self._alike if self._is_told]
        return found or None

    # ------------------------------------------------------------------ building
    def _size_parameters(self) -> None:
        blocks = self.graph.blocks
        uses = {use.name: use for use in self.graph.parameters}
        self.sums = ParameterSums.of(self.graph, offload=self.offload)
        state = self._held_bytes()
        ends = np.arange(len(blocks))[:, None] + np.arange(1, len(blocks) + 1)[None, :]
        fitting = (state <= self.most_bytes) & (ends <= len(blocks))
        self.max_length = max(1, int(fitting.any(axis=0).sum()))
        self.sums = self.sums.up_to(self.max_length)
        trained = [
            {name: uses[name].num_bytes for name in block.parameters if uses[name].trainable}
            for block in blocks
        ]
        self.shared = SharedInLane(
            blocks=trained,
            cluster=self.cluster,
            num_communicators=self.graph.num_communicators,
            state_factor=self._device_factor,
            num_groups=self.update_groups,
            rounded=self.rules.rounded,
        )
        if self.update_groups is not None:
            self._update_shares = update_shares(trained, self.max_length, self._divisors)
        gradients = np.array(
            [sum(n for name, n in sizes.items() if not uses[name].is_in_rows) for sizes in trained]
        )
        sums = np.array([sum(uses[name].sum_bytes for name in block.parameters) for block in blocks])
        self._held_gradients = (
            gradients.astype(float) if self.pricer.holds_gradients else np.zeros(len(blocks))
        )
        self._accumulation = _ACCUMULATION_MOVES * sums / self.cluster.device.memory_rate()

    def _price_blocks(self) -> None:
        rows = self._rows.tolist()
        # What a block saves may depend on who reads it: neighbours count.
        names = ["", *(block.structure for block in self.graph.blocks), ""]
        keys = list(zip(names, names[1:], names[2:]))
        first: dict[tuple[str, ...], Block] = {}
        for key, block in zip(keys, self.graph.blocks, strict=True):
            first.setdefault(key, block)
        self._alike = tuple(first[key] for key in keys)
        self._prices = {}
        budgets = {self.pricer.budgets[0], *(self._priced_as(budget) for budget in self.budgets)}
        for budget in (x for x in budgets if x is not None and x != SEGMENTS_BUDGET):
            known = {key: self.pricer.prices(block, rows, budget) for key, block in first.items()}
            self._prices[budget] = [known[key] for key in keys]
        if SEGMENTS_BUDGET in budgets:
            whole = self._prices[self.pricer.budgets[0]]
            self._prices[SEGMENTS_BUDGET] = self.segments.prices(whole, rows, self._told_prices(rows))
        self._returned = self.outputs.by_block(rows)

    def _build_tables(self, num_micro_batches: int, max_length: int) -> MicroBatchTables:
        counts = self.counts(num_micro_batches)
        columns = self._columns(num_micro_batches, counts)
        rows = self._rows[columns]
        messages = messages_over(self.graph, self.cluster, self._flows, columns, max_length)
        received, gradients = messages.travelling[:2]
        held, ends = self._held_bytes()[:, :max_length], ends_of(len(self.graph.blocks), max_length)
        rounded = self.rules.rounded
        state = rounded(self.sums.parameters) + rounded(self.sums.gradients)
        updated = self._updated_bytes(counts)[:, :max_length]
        fixed = state[:, :max_length, None] + rounded(self._device_factor * updated)
        fixed = fixed + rounded(
            num_micro_batches * over(self._returned[:, columns], ends)
            + self.outputs.of_any(num_micro_batches)
        )
        fixed += rounded(
            messages.fixed_bytes(num_micro_batches, counts, self._divisor(counts))
            + self.sums.rounded[:, :max_length, None] * (counts > 1)
        )
        whole = self._prices[self.pricer.budgets[0]]
        forward = seconds_over(np.stack([price.forward_seconds[columns] for price in whole]), ends)
        weight = np.stack([price.weight_seconds[columns] for price in whole]) + self._accumulation[:, None]
        again: Floats | float = 0.0
        if self._is_told:
            begins = np.arange(len(ends))[:, None]
            places = np.minimum(begins + np.arange(max_length)[None, :], len(ends) - 1)
            again = self.segments.told_again(whole, begins, places)[:, :, columns]
        largest = LargestOperators.of(self._alike if self.rules.transient_factor else (), rows.tolist())
        # Filled in place: stacking parts of this size takes as long as computing them.
        shape = (len(self.budgets), *forward.shape)
        backwards, fixed_bytes, flight_bytes = (np.empty(shape) for _ in range(3))
        for index, budget in enumerate(self.budgets):
            priced_as = self._priced_as(budget)
            prices = self._prices[self.pricer.budgets[0] if priced_as is None else priced_as]
            backward = seconds_over(
                np.stack([price.backward_seconds[columns] for price in prices]) + self._accumulation[:, None],
                ends,
            )
            own = np.stack([price.saved_bytes[columns] for price in prices])
            saved = over(own, ends)
            if priced_as == SEGMENTS_BUDGET:
                saved = np.maximum(saved - self._flows.over_intervals("leaving", columns, max_length), 0.0)
            more = again if priced_as == SEGMENTS_BUDGET else 0.0
            workspace = workspace_over(prices, columns, ends, self._held_gradients, more)
            workspace = self.rules.workspace(
                partial(largest.over, np.arange(len(rows)), max_length),
                workspace,
                partial(workspace_over, whole, columns, ends, self._held_gradients, 0.0),
            )
            workspace = workspace + _SMALL_THINGS * (held[:, :, None] + saved)
            if priced_as is None:
                backward, workspace, saved = backward + forward, workspace + saved, np.zeros_like(saved)
            backwards[index] = backward
            np.add(fixed, rounded(workspace), out=fixed_bytes[index])
            flight_bytes[index] = rounded(saved + messages.received)
        later = over(weight, ends)
        later[0] = backwards[:, 0].min(axis=0)  # nobody waits for gradients of the first stage's inputs
        return MicroBatchTables(
            replicas=counts,
            rows=rows,
            forward=forward,
            weight=later,
            kept_bytes=rounded(over(np.stack([price.kept_bytes[columns] for price in whole]), ends)),
            backward=backwards,
            fixed_bytes=fixed_bytes,
            flight_bytes=flight_bytes,
            message_bytes=received,
            gradient_bytes=gradients,
            update_bytes=np.broadcast_to(rounded(self._update_factor * updated), fixed.shape)
            if self._update_factor
            else None,
        )

    def _held_bytes(self) -> Floats:
        """[L, N]: parameters, gradients and optimizer state; at least, where that is divided."""
        optimizer = self._device_factor / self._divisors[-1] * self.sums.trainable
        return self.sums.parameters + self.sums.gradients + optimizer

    @property
    def _device_factor(self) -> float:
        return 0.0 if self.offload else self.optimizer_factor

    @property
    def _update_factor(self) -> float:
        return 0.0 if self.offload else self.rules.update_factor

    def _divisor(self, replicas: Ints) -> Ints:
        return divided_among(self.update_groups, replicas)

    def _updated_bytes(self, replicas: Ints) -> Floats:
        """[L, N, replicas]: bytes of parameters that a replica updates."""
        if self._update_shares is None:
            return self.sums.trainable[:, :, None]
        known = np.searchsorted(self._divisors, self._divisor(replicas), side="right") - 1
        return self._update_shares[:, :, known]
