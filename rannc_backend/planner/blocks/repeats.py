"""Repeated layers in a line of items, found from what the items are.

In: the kind of each item of a line. Out: `Repeat`s: from `start` on, `count` times the same `period` kinds,
without overlap. A period is looked for among the distances at which the same few kinds in a row (a *gram*)
come again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GRAM = 4
_MAX_PERIODS = 64  # that are tried for one stretch of the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def find_repeats(
    kinds: Sequence[int],
    begin: int,
    end: int,
    *,
    boundary_price: Callable[[int], float],
    is_worth: Callable[[int, int], bool],
) -> list[Repeat]:
    """Repeats within items `begin` to `end`, ascending: the longest, then those before and after it, as long
    as there are any.

    Args:
        boundary_price: of a cut before an item; repeats begin where such cuts are cheapest.
        is_worth: whether a repeat over these items is worth telling.
    """
    found: list[Repeat] = []
    pending = [(begin, end)]
    text = np.asarray(kinds)
    while pending:
        low, high = pending.pop()
        repeat = _longest(text, low, high, boundary_price)
        if repeat is not None and is_worth(repeat.start, repeat.stop):
            found.append(repeat)
            pending += [(low, repeat.start), (repeat.stop, high)]
    return sorted(found, key=lambda repeat: repeat.start)


def _longest(
    text: NDArray[np.int64], low: int, high: int, boundary_price: Callable[[int], float]
) -> Repeat | None:
    best: tuple[int, int, int] | None = None  # covered items, -period, first item
    for period in _candidate_periods(text, low, high):
        start, length = _longest_run(text[low : high - period] == text[low + period : high])
        if length >= period:
            best = max(best or (0, 0, 0), (length + period, -period, low + start))
    if best is None:
        return None
    covered, period, start = best[0], -best[1], best[2]
    phases = []
    for phase in range(period):
        count = (covered - phase) // period
        if count >= 2:
            price = float(
                np.median([boundary_price(start + phase + period * number) for number in range(count)])
            )
            phases.append((price, -count, phase))
    _, count, phase = min(phases)
    return Repeat(start=start + phase, period=period, count=-count)


def _candidate_periods(text: NDArray[np.int64], low: int, high: int) -> list[int]:
    """Distances between a gram and its next occurrence, those that are found most often; ascending."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    kinds = text[low:high].tolist()
    for place in range(len(kinds)):
        gram = tuple(kinds[place : place + _GRAM])
        if gram in last:
            distances[place - last[gram]] += 1
        last[gram] = place
    ranked = sorted(distances, key=lambda distance: (-distances[distance] * distance, distance))
    return sorted(distance for distance in ranked[:_MAX_PERIODS] if 2 * distance <= high - low)


def _longest_run(same: NDArray[np.bool_]) -> tuple[int, int]:
    """First place and length of the longest run of True."""
    stops = np.concatenate([[-1], np.flatnonzero(~same), [len(same)]])
    lengths = np.diff(stops) - 1
    longest = int(np.argmax(lengths))
    return int(stops[longest]) + 1, int(lengths[longest])
