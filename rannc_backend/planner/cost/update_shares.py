"""How many bytes of parameters a replica of a stage updates, where each parameter is updated by one of them.

In: the trainable parameters of each block, and the numbers of replicas among which a stage may divide its updates.
Out: for every interval of blocks a number that the replica with most bytes does not pass (`_bounds`).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def update_shares(
    blocks: Sequence[Mapping[str, int]], max_length: int, divisors: npt.NDArray[np.int64]
) -> Floats:
    """[blocks, lengths, divisors]: bytes of the interval that begins at a block and has so many blocks, over so many
    replicas. A parameter of several blocks counts once. Intervals beyond the last block are as those that end there.

    Args:
        blocks: bytes by parameter.
    """
    result = np.zeros((len(blocks), max_length, len(divisors)))
    most = int(divisors.max(initial=1)) + 1
    for begin in range(len(blocks)):
        negative: list[int] = []  # sizes, the largest first; no more than are asked for
        seen: set[str] = set()
        total = 0
        bound = np.zeros(len(divisors))
        for length in range(max_length):
            added = blocks[begin + length] if begin + length < len(blocks) else {}
            new = {name: size for name, size in added.items() if name not in seen}
            for size in new.values():
                bisect.insort(negative, -size)
                total += size
            del negative[most:]
            if new:
                seen.update(new)
                bound = _bounds(-np.array(negative, dtype=np.float64), total, divisors)
            result[begin, length] = bound
    return result


def _bounds(descending: Floats, total: int, divisors: npt.NDArray[np.int64]) -> Floats:
    """Bytes that the fullest of so many ranks does not pass under `ir.updates.divide`, for each divisor.

    The rank with most has one parameter alone, of the largest size at most; or else the last that it was given was no
    larger than the one after the first ``divisor``, and went to it since it had the least: no more than the mean of the
    others.

    Args:
        descending: sizes, at least one more than the largest divisor if there are so many.
        total: of all sizes.
    """
    padded = np.concatenate([descending, np.zeros(int(divisors.max(initial=1)) + 1)])
    divided = np.maximum(padded[0], total / divisors + padded[divisors] * (1 - 1 / divisors))
    return np.where(divisors > 1, divided, float(total))
