"""Sums and maxima over all intervals of blocks at once, the bytes of their parameters and of
what goes from block to block, and what stages need at least.

In: values by block, [L] or [L, columns]; a `BlockGraph`. Out: tables [L, N, columns], by first block and number of blocks
less one. A parameter of several blocks counts once in an interval that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import Block, BlockGraph, Flow, ParameterUse
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import BlockPrices
from rannc_backend.planner.cost.transfer import communicator_memory, message_memory

_Tables = TypeVar("_Tables", bound=Any)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_INFINITY = float("inf")
_ROUNDED_UP = 1 + 1e-9


def over(values: Floats, ends: Ints) -> Floats:
    """[L, N, columns]: sums of values [L, columns] over intervals."""
    sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
    return np.maximum(sums[ends] - sums[:-1, None], 0.0)


def seconds_over(values: Floats, ends: Ints) -> Floats:
    """As `over`, inf where a block is inf or the interval would end after the last block."""
    finite = np.isfinite(values)
    sums = over(np.where(finite, values, 0.0), ends)
    if not finite.all():
        sums[over((~finite).astype(float), ends) > 0] = np.inf
    for begin in range(max(0, len(values) - ends.shape[1] + 1), len(values)):
        sums[begin, len(values) - begin :] = np.inf
    return sums


def largest_over(values: Floats, max_length: int, added: Floats | float = 0.0) -> Floats:
    """[L, N, columns]: the largest of values [L, columns] in each interval. `added`: to the values, by the first block of
    the interval and the place in it.
    """
    padded = np.concatenate([values, np.full((max_length, values.shape[1]), -np.inf)])
    places = np.arange(len(values))[:, None] + np.arange(max_length)[None, :]
    return np.maximum.accumulate(padded[places] + added, axis=1)


def workspace_of(prices: Sequence[BlockPrices], held: Floats, again: Floats | float) -> Floats:
    """[rows]: workspace of a run of blocks at its fullest moment: blocks behind the one that runs have let go of what they
    saved, but may hold gradients [blocks]. `again`: what is computed again for a block.
    """
    let_go = np.cumsum([price.saved_bytes for price in prices] - held[:, None], axis=0)
    return np.asarray(
        np.max([price.workspace_bytes for price in prices] + let_go + again - let_go[-1], axis=0)
    )


def workspace_over(
    prices: Sequence[BlockPrices], columns: Ints, ends: Ints, held: Floats, again: Floats | float
) -> Floats:
    """[L, N, columns]: as `workspace_of`, of all intervals."""
    own, workspaces = (
        np.stack([getattr(price, kind)[columns] for price in prices])
        for kind in ("saved_bytes", "workspace_bytes")
    )
    let_go = np.cumsum(own - held[:, None], axis=0)
    return np.asarray(largest_over(workspaces + let_go, ends.shape[1], again) - let_go[ends - 1])


def least_work(
    counts: Ints,
    columns: Ints,
    whole: Sequence[BlockPrices],
    prices: Sequence[Sequence[BlockPrices]],
    alike: Sequence[Block],
) -> Floats:
    """[L]: seconds of each block on all replicas, with the budget and the count of replicas that are fastest for it."""
    work = np.empty(len(whole))
    known: dict[int, float] = {}
    for place, block in enumerate(whole):
        key = id(alike[place])
        if key not in known:
            backward = np.min([each[place].backward_seconds[columns] for each in prices], axis=0)
            known[key] = float((counts * (block.forward_seconds[columns] + backward)).min())
        work[place] = known[key]
    return work


@dataclass(frozen=True, slots=True, eq=False)
class LargestOperators:
    """Bytes of the two largest operators of each block in forward, with what they read: [2, L, rows]."""

    by_block: Floats

    @classmethod
    def of(cls, blocks: Sequence[Block], rows: Sequence[int]) -> LargestOperators:
        """Of blocks at numbers of rows."""
        found = np.zeros((2, len(blocks), len(rows)))
        for place, block in enumerate(blocks):
            sizes = np.sort(evaluate([*block.workspace_bytes, 0, 0], rows), axis=0)
            found[:, place] = sizes[-1], sizes[-2]
        return cls(found)

    def over(self, columns: Ints, max_length: int) -> Floats:
        """[L, N, columns]: the sum of the two largest of each interval; of one beyond the last block, as if it ended there."""
        first, second = self.by_block[:, :, columns]
        padding = np.zeros((max_length, first.shape[1]))
        firsts, seconds = np.concatenate([first, padding]), np.concatenate([second, padding])
        result = np.empty((len(first), max_length, first.shape[1]))
        largest, next_largest = first, second
        for length in range(max_length):
            if length:
                added = firsts[length : length + len(first)], seconds[length : length + len(first)]
                next_largest = np.maximum(np.minimum(largest, added[0]), np.maximum(next_largest, added[1]))
                largest = np.maximum(largest, added[0])
            result[:, length] = largest + next_largest
        return result

    def of_all(self) -> Floats:
        """[rows]: the sum of the two largest of all blocks."""
        return np.asarray(np.sort(self.by_block.reshape(-1, self.by_block.shape[2]), axis=0)[-2:].sum(axis=0))


def first_at_or_after(places: Sequence[int], first: int) -> tuple[Ints, Ints]:
    """Every begin from `first` on that has one of the ascending `places` at or after it, and the first such
    place.
    """
    begins = np.arange(first, places[-1] + 1)
    ordered = np.asarray(places, dtype=np.int64)
    return begins, ordered[np.searchsorted(ordered, begins)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParameterSums:
    """`parameters`: all of them; `trainable`: those that an optimizer updates; `gradients`: memory of their
    gradients; `sums`: of those, sums over micro-batches; `reduced`: what replicas send of them; `shared`: the part of
    `reduced` of parameters that blocks outside of the interval read too; `rounded`: copies of `sums` in fewer bits; `host`:
    what lies on the host.
    """

    parameters: Floats
    trainable: Floats
    gradients: Floats
    sums: Floats
    reduced: Floats
    shared: Floats
    rounded: Floats
    host: Floats

    @classmethod
    def of(cls, graph: BlockGraph, *, offload: bool = False) -> ParameterSums:
        """Of all intervals. ``offload``: parameters and gradients lie on the host, and a device has copies, and gradients
        until they are summed.
        """
        readers: dict[str, list[int]] = {}
        for block in graph.blocks:
            for name in block.parameters:
                readers.setdefault(name, []).append(block.index)
        uses = {use.name: use for use in graph.parameters}
        sizes_at: dict[tuple[int, ...], list[float]] = {}  # by the blocks that read the same
        for name, indexes in readers.items():
            sizes = sizes_at.setdefault(tuple(indexes), [0.0] * 6)
            for kind, size in enumerate(_sizes(uses[name])):
                sizes[kind] += size
        num_blocks = len(graph.blocks)
        added = np.zeros((7, num_blocks, num_blocks))
        for places, sizes in sizes_at.items():
            begins, ends = first_at_or_after(places, 0)
            for kind, size in enumerate(sizes):
                added[kind, begins, ends - begins] += size
            if len(places) > 1:
                added[6, begins, ends - begins] += sizes[4]
                whole = np.arange(places[0] + 1)
                added[6, whole, places[-1] - whole] -= sizes[4]
        parameters, trainable, gradients, sums, reduced, rounded, shared = np.cumsum(added, axis=2)
        return cls(
            parameters=parameters,
            trainable=trainable,
            gradients=sums if offload else gradients,
            sums=sums,
            reduced=reduced,
            shared=shared,
            rounded=rounded,
            host=parameters + gradients if offload else np.zeros_like(parameters),
        )

    def up_to(self, max_length: int) -> ParameterSums:
        """Of intervals of at most so many blocks."""
        return ParameterSums(
            parameters=self.parameters[:, :max_length],
            trainable=self.trainable[:, :max_length],
            gradients=self.gradients[:, :max_length],
            sums=self.sums[:, :max_length],
            reduced=self.reduced[:, :max_length],
            shared=self.shared[:, :max_length],
            rounded=self.rounded[:, :max_length],
            host=self.host[:, :max_length],
        )


def _sizes(use: ParameterUse) -> tuple[float, ...]:
    rounded = use.reduced_bytes if use.sum_share < 1 else 0.0
    trainable = use.num_bytes * use.trainable
    return use.num_bytes, trainable, use.gradient_bytes, use.sum_bytes, use.reduced_bytes, rounded


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlowSums:
    """`places`: by kind of flows, where in [begin, length] each begins (or ceases, with a minus) to count, for intervals of
    growing length; `num_bytes` [flows, rows]; `shares` [flows], by kind: bytes that travel per byte.
    """

    num_blocks: int
    places: Mapping[str, tuple[Ints, Ints, Ints, Floats]]
    num_bytes: Floats
    shares: Mapping[str, Floats]

    @classmethod
    def of(cls, graph: BlockGraph, rows: Sequence[int], max_length: int, between: Iterable[Flow]) -> FlowSums:
        """Of intervals of up to `max_length` blocks: what is "received", of that with "gradients"; what is "sent", of that
        with an "awaited" gradient; and of flows `between` segments those "leaving" the interval.
        """
        kinds = ("received", "gradients", "sent", "awaited", "leaving")
        entries: dict[str, list[tuple[Ints, Ints, int, float]]] = {kind: [] for kind in kinds}
        kept_names = {flow.name for flow in between}
        for index, flow in enumerate(graph.flows):
            begins, ends = first_at_or_after(flow.consumers, flow.producer + 1)
            entries["received"].append((begins, ends - begins, index, 1.0))
            if flow.needs_grad:
                entries["gradients"].append((begins, ends - begins, index, 1.0))
            before = np.arange(flow.producer + 1)
            if flow.name in kept_names:
                entries["leaving"].append((before, flow.producer - before, index, 1.0))
                entries["leaving"].append((before, flow.consumers[0] - before, index, -1.0))
            for kind in ("sent", "awaited") if flow.needs_grad else ("sent",):
                entries[kind].append((before, flow.producer - before, index, 1.0))
                entries[kind].append((before, flow.consumers[-1] - before, index, -1.0))
        places = {}
        for kind, found in entries.items():
            counts = [len(entry[0]) for entry in found]
            begins, lengths = (
                np.concatenate([np.zeros(0, dtype=np.int64), *(entry[part] for entry in found)])
                for part in range(2)
            )
            labels, signs = (np.repeat(np.array([entry[part] for entry in found]), counts) for part in (2, 3))
            kept = lengths < max_length
            places[kind] = (begins[kept], lengths[kept], labels[kept], signs[kept])
        num_bytes = evaluate([flow.num_bytes for flow in graph.flows], rows)
        values = np.array([flow.value_share for flow in graph.flows])
        gradients = np.array([flow.gradient_share for flow in graph.flows])
        shares = {"received": values, "sent": values, "gradients": gradients, "awaited": gradients}
        return cls(num_blocks=len(graph.blocks), places=places, num_bytes=num_bytes, shares=shares)

    def over_intervals(self, kind: str, columns: Ints, max_length: int, *, on_wire: bool = False) -> Floats:
        """[L, N, columns]: bytes of flows of a kind; ``on_wire``: of the messages that they travel in."""
        begins, lengths, flows, signs = self.places[kind]
        kept = lengths < max_length
        result = np.zeros((self.num_blocks, max_length, len(columns)))
        if kept.any():
            moved = signs[kept, None] * self.num_bytes[flows[kept]][:, columns]
            if on_wire:
                moved *= self.shares[kind][flows[kept], None]
            np.add.at(result, (begins[kept], lengths[kept]), moved)
        return np.maximum(np.cumsum(result, axis=1), 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkFloor:
    """For one number of micro-batches: `work` [blocks], at least what each block adds to the sum of replicas
    x seconds of a micro-batch over all stages; `held_bytes` [first block, blocks - 1], at least what a stage
    needs in memory; `most_replicas` of a stage."""

    work: Floats
    held_bytes: Floats
    most_replicas: int

    @cached_property
    def _works(self) -> Floats:
        """[first block, blocks - 1]: the work of stages."""
        num_blocks, max_length = self.held_bytes.shape
        sums = np.concatenate([[0.0], np.cumsum(self.work)])
        ends = np.minimum(np.arange(num_blocks)[:, None] + np.arange(1, max_length + 1)[None, :], num_blocks)
        return sums[ends] - sums[:-1, None]

    def of_stages(self, cuts: Ints) -> tuple[Floats, float]:
        """The works [stages] of stages with bounds [stages + 1], and what the fullest needs at least in
        memory: inf if it cannot fit.
        """
        lengths = np.diff(cuts)
        if lengths.max() > self.held_bytes.shape[1]:
            return np.zeros(len(lengths)), _INFINITY
        index = cuts[:-1], lengths - 1
        return self._works[index], float(self.held_bytes[index].max())

    def largest_share(self, memory_bytes: float) -> float:
        """The largest share of the work in one stage that may fit; 0 if none does."""
        return float(self._works[self.held_bytes <= memory_bytes].max(initial=0.0)) / max(
            float(self.work.sum()), 1e-300
        )

    def longest_stage(self, memory_bytes: float, most_seconds: float) -> int:
        """The most blocks, 1 at least, of a stage that may fit and compute a micro-batch in so many
        seconds.
        """
        num_blocks, max_length = self.held_bytes.shape
        is_whole = np.add.outer(np.arange(num_blocks), np.arange(1, max_length + 1)) <= num_blocks
        fitting = (
            is_whole
            & (self.held_bytes <= memory_bytes)
            & (self._works <= self.most_replicas * most_seconds * _ROUNDED_UP)
        )
        return int(np.flatnonzero(fitting.any(axis=0)).max(initial=0)) + 1


def received_bytes(
    graph: BlockGraph, begin: int, end: int, rows: Sequence[int], *, on_wire: bool = False
) -> tuple[Floats, Floats]:
    """[rows]: what the blocks [begin, end) receive of one micro-batch, and the gradients that they give back; `on_wire`: as
    it travels.
    """
    received = [
        flow for flow in graph.flows
        if flow.producer < begin and any(begin <= place < end for place in flow.consumers)
    ]  # fmt: skip
    return _values_and_gradients(received, rows, on_wire=on_wire)


def sent_bytes(
    graph: BlockGraph, begin: int, end: int, rows: Sequence[int], *, on_wire: bool = False
) -> tuple[Floats, Floats]:
    """[rows]: what the blocks [begin, end) hand on, and the gradients that come back; `on_wire`: as it travels."""
    sent = [flow for flow in graph.flows if begin <= flow.producer < end <= flow.consumers[-1]]
    return _values_and_gradients(sent, rows, on_wire=on_wire)


def _values_and_gradients(
    flows: Sequence[Flow], rows: Sequence[int], *, on_wire: bool
) -> tuple[Floats, Floats]:
    sizes = evaluate([flow.num_bytes for flow in flows], rows)
    values = np.array([flow.value_share if on_wire else 1.0 for flow in flows])
    gradients = np.array([(flow.gradient_share if on_wire else 1.0) * flow.needs_grad for flow in flows])
    return values @ sizes, gradients @ sizes


def ends_of(num_blocks: int, max_length: int) -> Ints:
    """[L, N]: the block after each interval; those beyond the last block count as ending there."""
    return np.minimum(np.arange(num_blocks)[:, None] + np.arange(1, max_length + 1)[None, :], num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """Bytes of what intervals receive, give back, hand on and get back, each [L, N, R], as it is and as it travels."""

    graph: BlockGraph
    cluster: Cluster
    whole: Sequence[Floats]
    travelling: Sequence[Floats]

    @property
    def received(self) -> Floats:
        """[L, N, R]: what is received, as it is there."""
        return self.whole[0]

    def fixed_bytes(self, num_micro_batches: int, replicas: Ints, divisor: Ints) -> Floats:
        """[L, N, R]: messages on their way and communicators; ``divisor`` of the replicas divide updates. What travels in
        fewer bits is there as it is, too, when it is packed or has been unpacked.
        """
        received, gradients, sent, awaited = self.travelling
        on_their_way = message_memory(self.cluster, num_micro_batches, sent, awaited, received, gradients)
        beside = sum(map(np.subtract, self.whole[1:], self.travelling[1:]))
        num_blocks, max_length = received.shape[:2]
        return np.asarray(
            on_their_way
            + beside
            + communicator_memory(
                self.cluster,
                num_blocks,
                np.arange(num_blocks)[:, None, None],
                ends_of(num_blocks, max_length)[:, :, None],
                replicas,
                self.graph.num_communicators,
                divisor,
            )
        )


def messages_over(
    graph: BlockGraph, cluster: Cluster, flows: FlowSums, columns: Ints, max_length: int
) -> Messages:
    """The messages of all intervals."""
    kinds = ("received", "gradients", "sent", "awaited")
    whole = [flows.over_intervals(kind, columns, max_length) for kind in kinds]
    travelling = whole
    if not graph.is_exact:
        travelling = [flows.over_intervals(kind, columns, max_length, on_wire=True) for kind in kinds]
    return Messages(graph=graph, cluster=cluster, whole=whole, travelling=travelling)


def messages_of(
    graph: BlockGraph,
    cluster: Cluster,
    interval: tuple[int, int],
    rows: Sequence[int],
    num_micro_batches: int,
    *,
    is_ahead: bool,
) -> float:
    """Bytes of messages on their way, and of what is there beside them where it travels in fewer bits."""
    begin, end = interval

    def sizes(kind: Callable[..., tuple[Floats, Floats]], *, on_wire: bool) -> tuple[float, float]:
        values, gradients = kind(graph, begin, end, rows, on_wire=on_wire)
        return float(values[0]), float(gradients[0])

    sent, awaited = sizes(sent_bytes, on_wire=True)
    received, gradients = sizes(received_bytes, on_wire=True)
    beside = sum(sizes(sent_bytes, on_wire=False)) - sent - awaited
    beside += sizes(received_bytes, on_wire=False)[1] - gradients
    ahead = received if is_ahead else 0.0
    return float(message_memory(cluster, num_micro_batches, sent, awaited, ahead, gradients)) + beside


def up_to(length: int, tables: _Tables) -> _Tables:
    """Tables of intervals of so many blocks at most: what is known of longer ones changes no search."""
    if tables.forward.shape[1] <= length:
        return tables
    columns = {item.name: getattr(tables, item.name) for item in fields(tables)}
    # Over intervals [..., L, N, R]; the others are over replica counts alone.
    return replace(
        tables, **{name: each[..., :length, :] for name, each in columns.items() if np.ndim(each) > 1}
    )
