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
    with_split_backwards,
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
        excess = stage.reduction_tail + self.excess(number, stage)
        steady = np.maximum(number * compute, (number - 1) * stage.message + compute) + stage.reduction_tail
        return excess, compute, path + np.maximum(steady, (number - 1) * stage.gradient + compute)


SCHEDULE = OneFOneB(name="1f1b", eager_backward=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleH1(Schedule):
    """1F1B whose backwards have two parts, so that the second ones fill what would be idle (ZB-H1 of Qi et al. 2023, "Zero
    Bubble Pipeline Parallelism").

    Stage s runs its W s micro-batches late: what it keeps for them, and the forwards that are in flight under 1F1B, are as
    many micro-batches as the first stage has in flight. The first stage runs each W right behind its I. With equal stages
    and W no longer than I, ranks compute nothing for (stages - 1) (F + I - W) of a step, under 1F1B for (stages - 1)
    (F + I + W).

    Bound of the step, for the stage with s before and a after it: P, and what the lane computes between the ends of its I of
    the first micro-batch and of its I of the last: all but a + 1 forwards, that I, and the s + 1 W that come behind.

        P + m c - min(a + 1, m) f - i - min(s + 1, m) w
    """

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`. Both parts come in ascending micro-batches."""
        lanes = SCHEDULE.order(num_stages, num_micro_batches)
        return tuple(with_split_backwards(lane, stage) for stage, lane in enumerate(lanes))

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """Those of 1F1B."""
        return SCHEDULE.in_flight(num_stages_to_end, num_micro_batches)

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """One for each stage before it, and the one whose I has just ended."""
        count = num_stages - num_stages_to_end + 1
        return (
            min(count, num_micro_batches) if isinstance(count, int) else np.minimum(count, num_micro_batches)
        )

    def excess(self, num_micro_batches: int, stage: PlaceSeconds) -> Floats:
        """See the class; of the first stage, the last W is a part of P."""
        number, inputs = num_micro_batches, stage.backward - stage.weight
        later = np.minimum(np.add(stage.num_before, 1), number) * stage.weight
        between = np.minimum(np.add(stage.num_after, 1), number) * stage.forward + inputs + later
        with np.errstate(invalid="ignore"):  # where a stage does not fit
            return number * (stage.forward + stage.backward) - between


ZB_H1 = ZeroBubbleH1(name="zb_h1", eager_backward=True, splits_backward=True)
