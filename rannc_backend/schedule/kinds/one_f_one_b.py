"""Stage s runs num_stages - s - 1 forwards ahead, then one forward and one backward in turn
(PipeDream-flush).

Bounds of the step: down to the last stage and up again costs P, and p micro-batches are in flight.

    for each stage   w of the stages before it + its t + u + m c
                     P + (m - 1) c - min(a, m - 1) min(f, b)
    if m > p         P (1 + n) + (m - 1 - n p) max c          for n = 1 and n = (m - 1) // p
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rannc_backend.ir.action import Program
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
class OneFOneB(Schedule):
    """See the module docstring."""

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        order: list[Program] = []
        for stage in range(num_stages):
            num_ahead = min(num_stages - stage - 1, num_micro_batches)
            lane = [forward_of(stage, m) for m in range(num_ahead)]
            for m in range(num_micro_batches):
                if m + num_ahead < num_micro_batches:
                    lane.append(forward_of(stage, m + num_ahead))
                lane.append(backward_of(stage, m))
            order.append(tuple(lane))
        return tuple(order)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """One for each stage that is still to come, and the stage's own."""
        if isinstance(num_stages_to_end, int):
            return min(num_stages_to_end, num_micro_batches)
        return np.minimum(num_stages_to_end, num_micro_batches)

    def levels(self, num_stages: int, num_micro_batches: int) -> Iterator[Level]:
        """Stage s runs ahead = stages - 1 - s forwards first. Forward m at level s + m while m < ahead, then
        at s + 2 m; backward m at 2 stages - 1 - s + 2 m.
        """
        stages, number = num_stages, num_micro_batches
        for level in range(2 * stages + 2 * number):
            if level < stages - 1:
                # m = level - s < stages - 1 - s always holds here; m < number.
                first = max(0, level - number + 1)
                yield Level(True, first, level, level - first, 1)
            # 2 m = level - s >= 2 ahead: s >= 2 stages - 2 - level.
            first, last = max(0, 2 * stages - 2 - level, level - 2 * number + 2), min(stages - 1, level)
            first += (level - first) % 2
            yield Level(True, first, last, (level - first) // 2, 2)
            # 2 m = level + s + 1 - 2 stages
            first = max(0, 2 * stages - 1 - level)
            last = min(stages - 1, 2 * number - 3 - level + 2 * stages)
            first += (level + first + 1) % 2
            yield Level(False, first, last, (level + first + 1 - 2 * stages) // 2, 2)

    def forwards_before(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """See `Schedule`."""
        return tuple(min(num_stages - 1 - stage, num_micro_batches - 1) for stage in range(num_stages))

    def weights(self, num_stages: int, num_micro_batches: int) -> Weights:
        """See the module docstring."""
        number, stages = num_micro_batches, num_stages
        if stages == 1:
            return [(1.0, number - 1.0)]
        trips = (number - 1) // stages
        return [(1.0 + n, float(number - 1 - n * stages)) for n in sorted({1, trips}) if 1 <= n <= trips]

    def quick_weights(self, num_stages: int, num_micro_batches: int) -> Weights:
        """min(f, b) is at most half of c."""
        number, weights = num_micro_batches, self.weights(num_stages, num_micro_batches)
        if num_stages == 1:
            return weights
        return [*weights, (1.0, number - 1 - min(num_stages - 1, number - 1) / 2)]

    def excess(self, num_micro_batches: int, stage: PlaceSeconds) -> Floats:
        """(m - 1) c - min(a, m - 1) min(f, b)."""
        number = num_micro_batches
        ahead = np.minimum(stage.num_after, number - 1) * np.minimum(stage.forward, stage.backward)
        return (number - 1) * (stage.forward + stage.backward) - ahead

    def exact_peaks(
        self, num_micro_batches: int, path: Floats, stage: StageSeconds
    ) -> tuple[Floats, Floats, Floats]:
        """Where messages take longer than a micro-batch they set the pace."""
        number, compute = num_micro_batches, stage.forward + stage.backward
        excess = stage.late + self.excess(number, stage)
        steady = np.maximum(number * compute, (number - 1) * stage.message + compute) + stage.late
        return excess, compute, path + np.maximum(steady, (number - 1) * stage.gradient + compute)


SCHEDULE = OneFOneB(name="1f1b", eager_backward=True)
