"""1F1B with two stages on each lane: of p lanes, lane l runs stages l and l + p (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").

The pipeline fills in stages of half the length, so ranks compute nothing for half as long as under 1F1B, and messages are
twice as many. The order is that of list scheduling with equal stages, of the fastest of a few rules: forwards of a lane's second
stage come before those of its first, or in groups of p micro-batches. Where micro-batches come in multiples of p, ranks
compute nothing for (p - 1) (F + B) of such a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rannc_backend.schedule.description import Count, Lanes, Order, Schedule
from rannc_backend.schedule.kinds.one_f_one_b import SCHEDULE as ONE_F_ONE_B
from rannc_backend.schedule.list_run import LaneCosts, Rule, list_order, peaks_of
from rannc_backend.schedule.merged import merged

_UNITS = LaneCosts(forward=1.0, inputs=2.0, weights=0.0)
_RULES = (
    Rule(most_in_flight=2.0, forward_first=True),
    Rule(most_in_flight=2.0, forward_first=True, by_groups=True),
    Rule(most_in_flight=1.5, forward_first=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(Schedule):
    """See the module docstring."""

    def lanes(self, num_stages: int) -> Lanes:
        """See `Schedule`: lane l of p has stages l, l + p, ..."""
        count = num_stages // self.stages_per_lane
        return tuple(tuple(range(lane, num_stages, count)) for lane in range(count))

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _order(self.lanes(num_stages), num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """All of them; `in_flight_bounds` says more."""
        return 0 * num_stages_to_end + num_micro_batches

    def in_flight_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """As the order has it."""
        return tuple(flying for flying, _ in peaks_of(self, num_stages, num_micro_batches))


@lru_cache(maxsize=64)
def _order(lanes: Lanes, num_micro_batches: int) -> Order:
    num_stages = sum(map(len, lanes))
    costs = (_UNITS,) * num_stages
    runs = [list_order(costs, lanes, num_micro_batches, rule, splits_backward=False) for rule in _RULES]
    found = [run for run in runs if run is not None]
    if not found:
        return merged(ONE_F_ONE_B.order(num_stages, num_micro_batches), lanes)
    return min(found, key=lambda run: run.seconds).order


SCHEDULE = Interleaved(name="interleaved", eager_backward=True, stages_per_lane=2)
