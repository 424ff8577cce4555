"""Which rows each rank holds, for every endpoint and micro-batch of one step.

In: the ranks' local batch sizes, the number of micro-batches and the ranks of each stage. Out: row intervals,
and for each message the pieces (peer rank, first row, end row) that one rank sends or receives. One rule, the
intersection of intervals, serves inputs, boundary values and outputs alike.

Terms. Rows are numbered globally: rank 0's samples first, then rank 1's. A micro-batch is an interval of
global rows; a replica of a stage works on a sub-interval of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rannc_backend.ir.action import INPUT, OUTPUT

Interval = tuple[int, int]


def split_interval(start: int, stop: int, num_parts: int) -> tuple[Interval, ...]:
    """``num_parts`` neighbouring intervals that cover [start, stop); sizes differ by one at most, larger ones
    first.
    """
    base, extra = divmod(stop - start, num_parts)
    intervals = []
    for part in range(num_parts):
        end = start + base + (part < extra)
        intervals.append((start, end))
        start = end
    return tuple(intervals)


@dataclass(frozen=True, slots=True)
class Piece:
    """Global rows [start, stop) that travel between this rank and ``peer``."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Rows of one step. ``gather_inputs=False``: rank 0's batch is the global batch and every rank gets all
    output rows.
    """

    local_rows: tuple[int, ...]
    num_micro_batches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    gather_inputs: bool = True

    @cached_property
    def global_rows(self) -> int:
        """Samples in the global batch."""
        return sum(self.local_rows) if self.gather_inputs else self.local_rows[0]

    @cached_property
    def micro_batches(self) -> tuple[Interval, ...]:
        """Row interval of each micro-batch."""
        return split_interval(0, self.global_rows, self.num_micro_batches)

    @cached_property
    def _rank_rows(self) -> tuple[Interval, ...]:
        if not self.gather_inputs:
            return tuple((0, self.global_rows if rank == 0 else 0) for rank in range(len(self.local_rows)))
        intervals, start = [], 0
        for rows in self.local_rows:
            intervals.append((start, start + rows))
            start += rows
        return tuple(intervals)

    # Each message of each step asks; the answers never change.
    @cached_property
    def _intervals(self) -> dict[tuple[int, int, int], Interval]:
        return {}

    @cached_property
    def _pieces(self) -> dict[tuple[int, int, int, int], tuple[Piece, ...]]:
        return {}

    def owned_rows(self, endpoint: int, rank: int) -> Interval:
        """Global rows of ``rank``'s own inputs or outputs over the whole step."""
        if endpoint == OUTPUT and not self.gather_inputs:
            return (0, self.global_rows)
        return self._rank_rows[rank]

    def ranks(self, endpoint: int) -> tuple[int, ...]:
        """Ranks that stand behind an endpoint."""
        return (
            tuple(range(len(self.local_rows))) if endpoint in (INPUT, OUTPUT) else self.stage_ranks[endpoint]
        )

    def interval(self, endpoint: int, rank: int, micro_batch: int) -> Interval:
        """Rows of ``micro_batch`` that ``rank`` holds at ``endpoint``; (x, x) when it holds none."""
        key = (endpoint, rank, micro_batch)
        if key not in self._intervals:
            self._intervals[key] = self._interval(endpoint, rank, micro_batch)
        return self._intervals[key]

    def _interval(self, endpoint: int, rank: int, micro_batch: int) -> Interval:
        start, stop = self.micro_batches[micro_batch]
        if endpoint in (INPUT, OUTPUT):
            own_start, own_stop = self.owned_rows(endpoint, rank)
            start, stop = max(start, own_start), min(stop, own_stop)
            return (start, max(start, stop))
        ranks = self.stage_ranks[endpoint]
        return split_interval(start, stop, len(ranks))[ranks.index(rank)]

    def pieces(self, endpoint: int, other: int, rank: int, micro_batch: int) -> tuple[Piece, ...]:
        """What ``rank`` at ``endpoint`` exchanges with the ranks of ``other``, in rank order; itself
        included.
        """
        key = (endpoint, other, rank, micro_batch)
        if key not in self._pieces:
            self._pieces[key] = self._find_pieces(endpoint, other, rank, micro_batch)
        return self._pieces[key]

    def _find_pieces(self, endpoint: int, other: int, rank: int, micro_batch: int) -> tuple[Piece, ...]:
        start, stop = self.interval(endpoint, rank, micro_batch)
        pieces = []
        for peer in self.ranks(other):
            peer_start, peer_stop = self.interval(other, peer, micro_batch)
            low, high = max(start, peer_start), min(stop, peer_stop)
            if low < high:
                pieces.append(Piece(peer, low, high))
        return tuple(pieces)

    def pairs(self, source: int, destination: int) -> frozenset[tuple[int, int]]:
        """The ranks, sender and receiver, between which rows of some micro-batch travel from one endpoint to
        the other.
        """
        found: set[tuple[int, int]] = set()
        for micro_batch in range(self.num_micro_batches):
            taking = [
                (self.interval(destination, rank, micro_batch), rank) for rank in self.ranks(destination)
            ]
            giving = [(self.interval(source, rank, micro_batch), rank) for rank in self.ranks(source)]
            taking = [entry for entry in taking if entry[0][0] < entry[0][1]]
            for (start, stop), sender in giving:
                found |= {
                    (sender, receiver)
                    for (first, end), receiver in taking
                    if max(start, first) < min(stop, end)
                }
        return frozenset((sender, receiver) for sender, receiver in found if sender != receiver)
