"""Two stages on each lane in the shape of a V, with backwards in two parts (ZB-V of Qi et al. 2024, "Pipeline Parallelism
with Controllable Memory"): of p lanes, lane l runs stages l and 2 p - 1 - l.

A micro-batch goes down the lanes and comes up again, so the first lane has its last stage, and begins its backward at once.
With equal stages and F, I and W of one length, ranks compute nothing for (p - 1) F at the begin of a step, and no lane holds
more than under 1F1B: what 2 p stages save of a micro-batch. The order is that of list scheduling with such seconds and such
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rannc_backend.schedule.description import Count, Lanes, Order, Schedule, with_split_backwards
from rannc_backend.schedule.kinds.one_f_one_b import SCHEDULE as ONE_F_ONE_B
from rannc_backend.schedule.list_run import LaneCosts, Rule, list_order, peaks_of
from rannc_backend.schedule.merged import merged

_RULE = Rule(most_in_flight=0.0, forward_first=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleV(Schedule):
    """See the module docstring."""

    def lanes(self, num_stages: int) -> Lanes:
        """See `Schedule` and the module docstring."""
        return tuple((lane, num_stages - 1 - lane) for lane in range(num_stages // 2))

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _order(num_stages, self.lanes(num_stages), num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """All of them; `in_flight_bounds` says more."""
        return 0 * num_stages_to_end + num_micro_batches

    def in_flight_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """As the order has it."""
        return tuple(flying for flying, _ in peaks_of(self, num_stages, num_micro_batches))

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """All of them; `kept_bounds` says more."""
        return 0 * num_stages_to_end + num_micro_batches

    def kept_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """As the order has it."""
        return tuple(kept for _, kept in peaks_of(self, num_stages, num_micro_batches))


@lru_cache(maxsize=64)
def _order(num_stages: int, lanes: Lanes, num_micro_batches: int) -> Order:
    unit = LaneCosts(flight_bytes=1.0, kept_bytes=1.0, limit_bytes=num_stages / 2)
    found = list_order((unit,) * num_stages, lanes, num_micro_batches, _RULE)
    if found is not None:
        return found.order
    chain = ONE_F_ONE_B.order(num_stages, num_micro_batches)
    return merged(tuple(with_split_backwards(lane, 0) for lane in chain), lanes)


SCHEDULE = ZeroBubbleV(name="zb_v", eager_backward=True, splits_backward=True, stages_per_lane=2)
