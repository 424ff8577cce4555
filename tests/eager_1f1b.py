"""A schedule that only the tests know: 1F1B with twice as many forwards ahead (Eager-1F1B of Zhuang et al. 2023, "On
Optimizing the Communication of Model Parallelism").

A stage has twice as many micro-batches to work on while a message is under way, and keeps what they save.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rannc_backend.schedule.description import Count, Order, Schedule, backward_of, forward_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOneFOneB(Schedule):
    """See the module docstring."""

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        lanes = []
        for stage in range(num_stages):
            num_ahead = min(2 * (num_stages - stage - 1), num_micro_batches)
            lane = [forward_of(stage, m) for m in range(num_ahead)]
            for m in range(num_micro_batches):
                if m + num_ahead < num_micro_batches:
                    lane.append(forward_of(stage, m + num_ahead))
                lane.append(backward_of(stage, m))
            lanes.append(tuple(lane))
        return tuple(lanes)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """Two for each stage that is still to come, and the stage's own."""
        if isinstance(num_stages_to_end, int):
            return min(2 * num_stages_to_end - 1, num_micro_batches)
        return np.minimum(2 * num_stages_to_end - 1, num_micro_batches)


SCHEDULE = EagerOneFOneB(name="eager_1f1b", eager_backward=True)
