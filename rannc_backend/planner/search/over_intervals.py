"""Sums and maxima over all intervals of blocks at once.

In: values by block, [L] or [L, columns]. Out: tables [L, N, columns], by first block and number of blocks less one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rannc_backend.planner.search.problem import Floats, Ints


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


def largest_over(values: Floats, max_length: int) -> Floats:
    """[L, N, columns]: the largest of values [L, columns] in each interval."""
    padded = np.concatenate([values, np.full((max_length, values.shape[1]), -np.inf)])
    places = np.arange(len(values))[:, None] + np.arange(max_length)[None, :]
    return np.maximum.accumulate(padded[places], axis=1)


def first_at_or_after(places: Sequence[int], first: int) -> tuple[Ints, Ints]:
    """Every begin from `first` on that has one of the ascending `places` at or after it, and the first such
    place.
    """
    begins = np.arange(first, places[-1] + 1)
    ordered = np.asarray(places, dtype=np.int64)
    return begins, ordered[np.searchsorted(ordered, begins)]
