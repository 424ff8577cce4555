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

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rannc_backend.schedule.description import (
    Count,
    Floats,
    Order,
    PlaceSeconds,
    Schedule,
    with_split_backwards,
)
from rannc_backend.schedule.kinds.one_f_one_b import SCHEDULE as ONE_F_ONE_B


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleH1(Schedule):
    """See the module docstring."""

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`. Both parts come in ascending micro-batches."""
        lanes = ONE_F_ONE_B.order(num_stages, num_micro_batches)
        return tuple(with_split_backwards(lane, stage) for stage, lane in enumerate(lanes))

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """Those of 1F1B."""
        return ONE_F_ONE_B.in_flight(num_stages_to_end, num_micro_batches)

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """One for each stage before it, and the one whose I has just ended."""
        count = num_stages - num_stages_to_end + 1
        return (
            min(count, num_micro_batches) if isinstance(count, int) else np.minimum(count, num_micro_batches)
        )

    def excess(self, num_micro_batches: int, stage: PlaceSeconds) -> Floats:
        """See the module docstring; of the first stage, the last W is a part of P."""
        number, inputs = num_micro_batches, stage.backward - stage.weight
        later = np.minimum(np.add(stage.num_before, 1), number) * stage.weight
        between = np.minimum(np.add(stage.num_after, 1), number) * stage.forward + inputs + later
        with np.errstate(invalid="ignore"):  # where a stage does not fit
            return number * (stage.forward + stage.backward) - between


SCHEDULE = ZeroBubbleH1(name="zb_h1", eager_backward=True, splits_backward=True)
