"""How many bytes of parameters a replica of a stage updates, where each parameter is updated by one of them; and what
stages on the same ranks have in common.

In: the trainable parameters of each block, and the numbers of replicas among which a stage may divide its updates.
Out: for every interval of blocks a number that the replica with most bytes does not pass (`_bounds`); for the stages of
a lane, the bytes that they need together less than one by one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.transfer import communicator_memory

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


def divided_among(num_groups: int | None, replicas: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Among how many replicas the smallest group divides its updates; None: every replica updates all."""
    if num_groups is None:
        return np.ones_like(replicas)
    return np.maximum(1, replicas // np.minimum(num_groups, replicas))


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedInLane:
    """What stages on the same ranks have in common: communicators, which are made once for the same ranks; and the division
    of updates, which is one for all parameters of a rank.

    Attributes:
        blocks: of each, bytes by trainable parameter.
        state_factor: bytes of optimizer state on the device per byte that a replica updates.
        num_groups: of replicas that divide updates; None: all update all.
        rounded: how bytes are counted.
    """

    blocks: Sequence[Mapping[str, int]]
    cluster: Cluster
    num_communicators: int
    state_factor: float
    num_groups: int | None
    rounded: Callable[[Floats], Floats]

    def communicators(self, begin: int, end: int, replicas: int) -> float:
        """Bytes of those of one stage alone on its ranks."""
        ends = np.array(begin), np.array(end), np.array(replicas)
        divisor = divided_among(self.num_groups, ends[2])
        return float(
            communicator_memory(self.cluster, len(self.blocks), *ends, self.num_communicators, divisor)
        )

    def counted_twice(
        self, stages: Sequence[tuple[int, int]], replicas: int, num_neighbours: int
    ) -> tuple[Floats, Floats]:
        """By stage of a lane, how many bytes its own account has too many: of optimizer state, and of communicators, which
        the first stage has for all (so it may have too few).

        Args:
            stages: first block and the block after the last one of each.
            num_neighbours: other lanes with which the lane exchanges messages.
        """
        excess = np.array([self.communicators(begin, end, replicas) for begin, end in stages])
        one = self.cluster.device.communicator_bytes * (self.cluster.num_devices > 1)
        excess[0] -= self.communicators(0, len(self.blocks), replicas) + num_neighbours * one
        return self._updates_counted_twice(stages, replicas), excess

    def _updates_counted_twice(self, stages: Sequence[tuple[int, int]], replicas: int) -> Floats:
        divisor = divided_among(self.num_groups, np.array([replicas]))
        if divisor[0] == 1:
            return np.zeros(len(stages))
        parameters = [
            {name: size for block in self.blocks[begin:end] for name, size in block.items()}
            for begin, end in stages
        ]
        own = np.array([self._updated(each, divisor) for each in parameters])
        together = self._updated({name: size for each in parameters for name, size in each.items()}, divisor)
        shares = own * (together / own.sum()) if own.any() else own
        return self.rounded(self.state_factor * own) - self.rounded(
            self.state_factor * np.minimum(own, shares)
        )

    def _updated(self, parameters: Mapping[str, int], divisor: npt.NDArray[np.int64]) -> float:
        sizes = np.sort(np.array(list(parameters.values()), dtype=np.float64))[::-1]
        return float(_bounds(sizes, sum(parameters.values()), divisor)[0]) if len(sizes) else 0.0
