"""All forwards, then all backwards (GPipe).

Bound of the step: P + (m - 1) (max of f and t + max of b and u). Backwards run in ascending micro-batches, as
those of 1F1B do: gradients are summed in the same sequence, and the results of the two are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rannc_backend.schedule.description import (
    Count,
    Floats,
    Level,
    Order,
    PlaceSeconds,
    Schedule,
    StageSeconds,
    Weights,
    backward_of,
    forward_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillDrain(Schedule):
    """See the module docstring."""

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return tuple(
            tuple(forward_of(stage, m) for m in range(num_micro_batches))
            + tuple(backward_of(stage, m) for m in self.backwards(num_micro_batches))
            for stage in range(num_stages)
        )

    def backwards(self, num_micro_batches: int) -> range:
        """The micro-batches in the sequence of their backwards."""
        return range(num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """All of them."""
        return 0 * num_stages_to_end + num_micro_batches

    def levels(self, num_stages: int, num_micro_batches: int) -> Iterator[Level]:
        """Forward m of stage s at level s + m; backwards in the same way, from the last stage."""
        stages, number = num_stages, num_micro_batches
        for level in range(stages + number - 1):
            first = max(0, level - number + 1)
            yield Level(True, first, min(level, stages - 1), level - first, 1)
        for level in range(stages + number - 1):
            # Stage s runs micro-batch level - (stages - 1 - s).
            first, last = max(0, stages - 1 - level), min(stages - 1, stages - 2 - level + number)
            yield Level(False, first, last, level - (stages - 1 - first), 1)

    def weights(self, num_stages: int, num_micro_batches: int) -> Weights:
        """Every micro-batch but one waits for the slowest stage."""
        return [(1.0, num_micro_batches - 1.0)]

    def excess(self, num_micro_batches: int, stage: PlaceSeconds) -> Floats:
        """Of the backwards; those of the forwards are `longest`."""
        return (num_micro_batches - 1) * stage.backward

    def longest(self, forward: Floats, backward: Floats) -> Floats:
        """Forwards."""
        return forward

    def bound_of_peaks(
        self,
        num_stages: int,
        num_micro_batches: int,
        path: Floats,
        excess: Floats,
        longest: Floats,
        highest: float,
    ) -> Floats:
        """The slowest forward and the slowest backward may be of two stages."""
        later = longest * (num_micro_batches - 1) if num_micro_batches > 1 else 0.0
        result = path + later + excess
        none = np.zeros_like(longest)
        return self._weighted(num_stages, num_micro_batches, path, result, none, highest)

    def bound_of_stages(
        self, num_micro_batches: int, forward: Floats, backward: Floats, weight: Floats
    ) -> Floats:
        """See `Schedule`."""
        path = (forward + backward).sum(axis=0)
        return path + (num_micro_batches - 1) * (forward.max(axis=0) + backward.max(axis=0))

    def exact_peaks(
        self, num_micro_batches: int, path: Floats, stage: StageSeconds
    ) -> tuple[Floats, Floats, Floats]:
        """Messages follow each other as computations do."""
        later = num_micro_batches - 1
        excess = np.maximum(later * stage.backward + stage.reduction_tail, later * stage.gradient)
        own = path + (stage.forward + stage.backward) + stage.reduction_tail
        return excess, np.maximum(stage.forward, stage.message), own


SCHEDULE = FillDrain(name="fill_drain", eager_backward=False)
