"""Segments: the parts of a stage that are computed again one at a time, and what that costs.

In: a block graph. Out: the segment of each block, and the prices of blocks where a stage keeps what goes from one
segment to the next and computes the rest again.

Segments are made once for the line of all blocks. Under 1F1B the first of p stages keeps p micro-batches of about
1/p of the blocks: all that goes from segment to segment, once. Beside that it needs what one segment saves while it
is computed again. The sum of the two is the least for the segments that are chosen (Chen et al. 2016, "Training Deep
Nets with Sublinear Memory Cost", for chains of equal layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import Block, BlockGraph, Flow
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import BlockPrices

Floats = NDArray[np.float64]

_ROWS = 8  # at which segments are compared: bytes grow with the rows
# What is computed again lies there until its own backward, also what would otherwise be computed late and cheaply: of
# what is saved where everything is kept, so much was seen on small models; less where kernels compute it inline.
AGAIN_SHARE, AGAIN_SHARE_FUSED = 1.75, 1.25
_NUM_LIMITS = 64  # of what a segment may save, that are tried


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a graph. ``of_block``: numbers, ascending along the line. ``fused``: by stages whose elementwise
    operators are computed within other kernels.
    """

    graph: BlockGraph
    fused: bool

    @property
    def again_share(self) -> float:
        """What a segment needs while it is computed again, of what its blocks save where everything is kept."""
        return AGAIN_SHARE_FUSED if self.fused else AGAIN_SHARE

    @cached_property
    def of_block(self) -> tuple[int, ...]:
        saved = evaluate([block.saved_bytes for block in self.graph.blocks], [_ROWS])
        return best_segments(self.again_share * saved.sum(axis=1), self._kept_by_run())

    @property
    def of_node(self) -> dict[str, int]:
        """The same by name of a node."""
        numbers = zip(self.graph.blocks, self.of_block, strict=True)
        return {name: number for block, number in numbers for name in block.nodes}

    @cached_property
    def kept(self) -> tuple[Flow, ...]:
        """Values that go from one segment to a later one."""
        number = self.of_block
        return tuple(
            flow
            for flow in self.graph.flows
            if flow.producer >= 0 and number[flow.consumers[-1]] > number[flow.producer]
        )

    def prices(
        self, whole: Sequence[BlockPrices], rows: Sequence[int], told: Sequence[BlockPrices] | None = None
    ) -> list[BlockPrices]:
        """What blocks cost at the numbers of rows, from what they cost where everything is kept. `told`: what they cost
        where each computes again what the user names, as if it were a stage.

        A block's backward computes it again first; its segment has then been computed again up to it and beyond. What
        leaves the stage at its end is among the saved bytes: see `leaving`.
        """
        if told is not None:
            return [self._told_price(*pair) for pair in zip(self.graph.blocks, whole, told, strict=True)]
        kept = np.zeros((len(whole), len(rows)))
        for flow, sizes in zip(
            self.kept, evaluate([flow.num_bytes for flow in self.kept], rows), strict=True
        ):
            kept[flow.producer] += sizes
        again: dict[int, Floats] = {}
        for number, price in zip(self.of_block, whole, strict=True):
            again[number] = again.get(number, np.zeros(len(rows))) + self.again_share * price.saved_bytes
        return [
            BlockPrices(
                forward_seconds=price.forward_seconds,
                backward_seconds=price.backward_seconds + price.forward_seconds,
                saved_bytes=kept[place],
                workspace_bytes=price.workspace_bytes + again[number],
                weight_seconds=price.weight_seconds,
                kept_bytes=price.kept_bytes,
            )
            for place, (number, price) in enumerate(zip(self.of_block, whole, strict=True))
        ]

    def leaving(self, begin: int, end: int, rows: Sequence[int]) -> Floats:
        """[rows]: bytes of the saved values of blocks that no other block of the interval reads."""
        found = [flow for flow in self.kept if begin <= flow.producer < end <= flow.consumers[0]]
        return evaluate([flow.num_bytes for flow in found], rows).sum(axis=0)

    def _told_price(self, block: Block, whole: BlockPrices, told: BlockPrices) -> BlockPrices:
        """A block from which something is computed again for a later one is computed again as a whole."""
        again = whole.backward_seconds + whole.forward_seconds
        if block.index not in self._read_again:
            return told
        return replace(told, backward_seconds=np.maximum(told.backward_seconds, again))

    @cached_property
    def _read_again(self) -> frozenset[int]:
        return frozenset(flow.producer for flow in self.graph.flows if flow.is_again)

    def told_again(
        self, whole: Sequence[BlockPrices], begins: NDArray[np.int64], places: NDArray[np.int64]
    ) -> Floats:
        """[..., rows]: what lies in memory at blocks `places` of stages that begin at blocks `begins`, of earlier blocks
        from which the user wants something computed again together with something of theirs.
        """
        held = np.cumsum([self.again_share * price.saved_bytes for price in whole], axis=0)
        held = np.concatenate([np.zeros_like(held[:1]), held])
        firsts = [block.index if block.again_from < 0 else block.again_from for block in self.graph.blocks]
        return np.asarray(held[places] - held[np.maximum(begins, np.array(firsts)[places])])

    def _kept_by_run(self) -> Floats:
        """[begin, end]: bytes that blocks from begin to end make for later ones."""
        size = len(self.graph.blocks)
        kept = np.zeros((size + 1, size + 1))
        flows = [flow for flow in self.graph.flows if flow.producer >= 0]
        sizes = evaluate([flow.num_bytes for flow in flows], [_ROWS]).sum(axis=1)
        for flow, num_bytes in zip(flows, sizes, strict=True):
            kept[: flow.producer + 1, flow.producer + 1 : flow.consumers[-1] + 1] += num_bytes
        return kept


def best_segments(saved: Floats, kept: Floats) -> tuple[int, ...]:
    """The segment of each block, so that what is kept and what the fullest segment saves are least together.

    Args:
        saved: of each block, what its segment needs while it is computed again.
        kept: [begin, end], what blocks from begin to end make for later ones.
    """
    size = len(saved)
    before = np.concatenate([[0.0], np.cumsum(saved)])
    runs = before[None, :] - before[:, None]
    least, most = float(saved.max(initial=0.0)), float(before[-1])
    best, found = float("inf"), [0] * size
    limits = np.geomspace(max(least, 1.0), max(most, 1.0), _NUM_LIMITS) * (1 + 1e-9)
    # [limits, end]: the least that is kept, and where its last segment begins; for all limits at one time.
    totals = np.full((_NUM_LIMITS, size + 1), np.inf)
    starts = np.zeros((_NUM_LIMITS, size + 1), dtype=np.int64)
    totals[:, 0] = 0.0
    for end in range(1, size + 1):
        sums = np.where(runs[:end, end] <= limits[:, None], totals[:, :end] + kept[:end, end], np.inf)
        starts[:, end] = sums.argmin(axis=1)
        totals[:, end] = sums.min(axis=1)
    for place_of, total in zip(starts, totals[:, size], strict=True):
        bounds = [size]
        while bounds[-1]:
            bounds.append(int(place_of[bounds[-1]]))
        bounds.reverse()
        fullest = max((runs[a, b] for a, b in zip(bounds, bounds[1:], strict=False)), default=0.0)
        if total + fullest < best:
            best = total + fullest
            inner = set(bounds[1:-1])
            found = np.cumsum([place in inner for place in range(size)]).tolist()
    return tuple(found)
