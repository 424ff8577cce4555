"""Where to cut a line of items into at most k blocks: balanced, where little crosses, and in equal layers at
the same places.

In: an `AtomGraph` in line order and cuts that must be made. Out: the bounds of the blocks.
Terms: cut c is before item c. The *price* of a line of blocks is the sum of squares of their seconds over the
mean of k blocks, plus for each cut its penalty: more where more bytes cross, and a little inside of a module.
The line is a row of *segments*: a repeat is one segment of `count` equal units, what lies between repeats are
segments of one unit. Each segment's best price for each number of blocks is found by an exact dynamic
programme over the cuts of one unit, and blocks are shared out by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rannc_backend.planner.blocks.atom_graph import AtomGraph, Floats
from rannc_backend.planner.blocks.repeats import find_repeats

_MAX_CUTS = 600  # of one unit; the programme is quadratic in it
_CROSSING_WEIGHT = 0.5  # price of a cut that twice as much crosses as crosses a good one
_MAX_CROSSING_RATIO = 8.0
_IN_MODULE_WEIGHT = 0.1  # price of a cut inside of a module
_ALIGNED_FACTOR = 1.15  # how much more than the best cuts those may cost that are the same in equal layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """`count` units from item `start`, each of `length` items; `seconds` and `penalty`: per item, the mean
    over units.
    """

    start: int
    length: int
    count: int
    seconds: Floats
    penalty: Floats


def cut_line(
    graph: AtomGraph, forced: Sequence[int], *, max_blocks: int, good_bytes: float
) -> tuple[list[int], float]:
    """Bounds [0, ..., number of items] of at most `max_blocks` blocks (more only if `forced` asks for more),
    and their price.

    Args:
        good_bytes: what crosses a good cut, see `good_crossing`.
    """
    num_items = graph.num_atoms
    regions = sorted({0, *forced, num_items})
    mean = max(float(graph.seconds.sum()) / max_blocks, 1e-30)
    weights = graph.seconds / mean
    penalty = _penalties(graph, good_bytes)
    max_blocks = max(max_blocks, len(regions) - 1)
    if num_items <= max_blocks:
        bounds = list(range(num_items + 1))
        return bounds, _price(bounds, weights, penalty)
    plain = [
        _segment(begin, end - begin, 1, weights, penalty)
        for begin, end in zip(regions, regions[1:], strict=False)
    ]
    segments = _segments(graph, regions, weights, penalty)
    if len(segments) > max_blocks:
        bounds = _share_out(plain, max_blocks)
        return bounds, _price(bounds, weights, penalty)
    # Layers cut alike may need fewer blocks: finer ones would make every later step slower and gain next to
    # nothing.
    alike = _share_out(segments, max_blocks)
    best = _share_out(plain, len(alike) - 1)
    prices = [_price(bounds, weights, penalty) for bounds in (alike, best)]
    return (alike, prices[0]) if prices[0] <= _ALIGNED_FACTOR * prices[1] else (best, prices[1])


def crossing_bytes(graph: AtomGraph) -> Floats:
    """[items + 1]: bytes that are made before each cut and read after it."""
    change = np.zeros(graph.num_atoms + 1)
    for value in graph.values:
        change[value.producer + 1] += value.num_bytes
        change[value.readers[-1] + 1] -= value.num_bytes
    # Sums of large numbers that cancel leave crumbs, which must not decide between equal cuts.
    return np.cumsum(change).round(3)


def good_crossing(graph: AtomGraph) -> float:
    """Bytes that cross one of the better cuts of the line: the lowest tenth."""
    crossing = crossing_bytes(graph)[1:-1]
    positive = crossing[crossing > 0]
    return float(np.quantile(positive, 0.1)) if len(positive) else 1.0


def _penalties(graph: AtomGraph, good_bytes: float) -> Floats:
    """[items]: of the cut before each item; cut 0 costs nothing."""
    ratio = np.minimum(crossing_bytes(graph)[:-1] / good_bytes, _MAX_CROSSING_RATIO)
    paths = [path.split(".") if path else [] for path in graph.modules]
    shared = [0.0, *(_shared_part(*pair) for pair in zip(paths, paths[1:], strict=False))]
    penalty = _CROSSING_WEIGHT * ratio + _IN_MODULE_WEIGHT * np.array(shared)
    penalty[:1] = 0.0
    return penalty


def _shared_part(before: Sequence[str], after: Sequence[str]) -> float:
    """1 within a module, less the higher in the module tree the cut is."""
    common = next(
        (depth for depth, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None
    )
    depth = min(len(before), len(after)) if common is None else common
    return depth / max(len(before), len(after), 1)


def _price(bounds: Sequence[int], weights: Floats, penalty: Floats) -> float:
    done = np.concatenate([[0.0], np.cumsum(weights)])
    return float((np.diff(done[list(bounds)]) ** 2).sum() + penalty[list(bounds[:-1])].sum())


def _segment(start: int, length: int, count: int, weights: Floats, penalty: Floats) -> _Segment:
    stop = start + length * count
    return _Segment(
        start=start,
        length=length,
        count=count,
        seconds=weights[start:stop].reshape(count, length).mean(axis=0),
        penalty=penalty[start:stop].reshape(count, length).mean(axis=0),
    )


def _segments(graph: AtomGraph, regions: Sequence[int], weights: Floats, penalty: Floats) -> list[_Segment]:
    done = np.concatenate([[0.0], np.cumsum(weights)])
    result = []
    for begin, end in zip(regions, regions[1:], strict=False):
        repeats = find_repeats(
            graph.kinds,
            begin,
            end,
            boundary_price=lambda cut: float(penalty[cut]),
            is_worth=lambda a, b: done[b] - done[a] >= 2.0,
        )
        place = begin
        for repeat in repeats:
            if place < repeat.start:
                result.append(_segment(place, repeat.start - place, 1, weights, penalty))
            result.append(_segment(repeat.start, repeat.period, repeat.count, weights, penalty))
            place = repeat.stop
        if place < end:
            result.append(_segment(place, end - place, 1, weights, penalty))
    return result


def _share_out(segments: Sequence[_Segment], max_blocks: int) -> list[int]:
    """Bounds of the blocks at the lowest price over all ways to give each segment a number of blocks,
    `max_blocks` in all at most.
    """
    best = np.full(max_blocks + 1, np.inf)
    best[0] = 0.0
    tables = [_prices_of(segment, max_blocks - len(segments) + 1) for segment in segments]
    choices = []
    for prices, _ in tables:
        total = np.full((len(prices), max_blocks + 1), np.inf)
        for number in range(1, len(prices)):
            total[number, number:] = prices[number] + best[: max_blocks + 1 - number]
        choices.append(np.argmin(total, axis=0))
        best = total.min(axis=0)
    left = int(np.argmin(best))
    numbers = []
    for choice in reversed(choices):
        numbers.append(int(choice[left]))
        left -= numbers[-1]
    bounds = [0]
    for segment, (_, pieces), number in zip(segments, tables, reversed(numbers), strict=True):
        bounds += _bounds_of(segment, pieces, number)
    return bounds


def _prices_of(segment: _Segment, max_blocks: int) -> tuple[Floats, list[list[int]]]:
    """[blocks + 1] price of the segment in so many blocks, and the cuts of one unit for each number of
    pieces.

    A segment of several units in as many blocks or more gives each unit as many pieces, else several units to
    each block.
    """
    most = max(1, min(segment.length, -(-max_blocks // segment.count)))
    piece_prices, pieces = _cut_unit(segment, most)
    prices = np.full(max_blocks + 1, np.inf)
    weight = float(segment.seconds.sum())
    for number in range(1, max_blocks + 1):
        few, more = divmod(number, segment.count)
        if few == 0:
            size, larger = divmod(segment.count, number)
            squares = larger * (size + 1) ** 2 + (number - larger) * size**2
            prices[number] = squares * weight**2 + number * segment.penalty[0]
        elif more == 0 and few <= most:
            prices[number] = segment.count * piece_prices[few]
    return prices, pieces


def _bounds_of(segment: _Segment, pieces: Sequence[Sequence[int]], number: int) -> list[int]:
    """The ends of the segment's blocks when it gets `number` of them."""
    few, more = divmod(number, segment.count)
    if few == 0:
        return [
            segment.start + segment.length * (segment.count * (block + 1) // number)
            for block in range(number)
        ]
    assert more == 0, "equal units are cut alike"
    return [
        segment.start + unit * segment.length + cut
        for unit in range(segment.count)
        for cut in pieces[few][1:]
    ]


def _cut_unit(segment: _Segment, most: int) -> tuple[Floats, list[list[int]]]:
    """Best price and bounds of one unit in 0 (not possible), 1, ..., `most` pieces, by an exact dynamic
    programme over the cuts.

    Of a longer unit only so many cuts count, the cheapest of each stretch.
    """
    cuts = np.arange(1, segment.length)
    if len(cuts) > _MAX_CUTS:
        windows = np.array_split(cuts, _MAX_CUTS)
        cuts = np.array([int(window[np.argmin(segment.penalty[window])]) for window in windows])
    places = np.array([0, *cuts.tolist(), segment.length])
    done = np.concatenate([[0.0], np.cumsum(segment.seconds)])[places]
    price = (done[None, :] - done[:, None]) ** 2 + np.append(segment.penalty[places[:-1]], 0.0)[:, None]
    price[np.tril_indices(len(places))] = np.inf
    best = price[0].copy()
    choices: list[NDArray[np.intp]] = []
    prices, pieces = [np.inf, best[-1]], [[], [0, segment.length]]
    for _ in range(min(most, len(places) - 1) - 1):
        total = best[:, None] + price
        choices.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
        bounds = [len(places) - 1]
        for choice in reversed(choices):
            bounds.append(int(choice[bounds[-1]]))
        prices.append(best[-1])
        pieces.append([0, *(int(places[bound]) for bound in reversed(bounds))])
    prices += [np.inf] * (most + 1 - len(prices))
    return np.array(prices), pieces
