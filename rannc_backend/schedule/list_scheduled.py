"""An order made for one plan: by list scheduling over the plan's own seconds, within its memory.

In: of each stage the seconds of F, I, W and of its messages, and the bytes that it may hold; the stages of each lane.
Out: an order. Of the orders that a few rules make (see `schedule/list_run.py`), the one whose step is shortest is taken
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", make theirs so, with other rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rannc_backend.schedule.chain import order_seconds
from rannc_backend.schedule.description import Count, Lanes, Order, Schedule, one_stage_each
from rannc_backend.schedule.list_run import (
    LaneCosts,
    Rule,
    list_order,
    lower_bound_seconds,
    most_held,
    safe_order,
)
from rannc_backend.schedule.lowering import waiting_in
from rannc_backend.schedule.orders import peaks_of

_INFINITY = float("inf")
_NEAR = 1e-3  # of the lower bound: no other rule is tried
_NEAR_RUN = 0.01  # a run of a chain may take longer than the programs of its order, by less than this

_RULES = tuple(
    Rule(most_in_flight=most, forward_first=first, gap=gap)
    for most, first in ((0.0, False), (1.0, True), (1.5, True), (2.0, True))
    for gap in (0.0, 0.5, 1.0)
)
# Of lanes with several stages. Those of several gaps differ little.
_LANE_RULES = tuple(
    Rule(most_in_flight=most, forward_first=first, gap=gap, by_groups=groups)
    for groups, most, first in (
        (True, 2.0, True),
        (True, 1.5, True),
        (True, 0.0, False),
        (False, 2.0, True),
        (False, 0.0, False),
    )
    for gap in (0.0, 1.0)
)
_MAX_TRIES = 3  # with less and less memory, where messages that come early take some


@dataclass(frozen=True, slots=True, kw_only=True)
class ListScheduled(Schedule):
    """See the module docstring. `costs`: by stage; without any, all seconds are 1 and memory is no matter.
    `lanes_of_plan`: where they have several stages.
    """

    costs: tuple[LaneCosts, ...] = ()
    lanes_of_plan: Lanes = ()

    def lanes(self, num_stages: int) -> Lanes:
        """See `Schedule`."""
        is_own = sum(map(len, self.lanes_of_plan)) == num_stages
        return self.lanes_of_plan if is_own else one_stage_each(num_stages)

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _best_order(self._costs_of(num_stages), self.lanes(num_stages), num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """As the order has it; without costs, all of them."""
        if not self.costs or not isinstance(num_stages_to_end, int):
            return 0 * num_stages_to_end + num_micro_batches
        return peaks_of(self, len(self.costs), num_micro_batches)[len(self.costs) - num_stages_to_end][0]

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """As the order has it; without costs, all of them."""
        if not self.costs or not isinstance(num_stages_to_end, int):
            return 0 * num_stages_to_end + num_micro_batches
        return peaks_of(self, len(self.costs), num_micro_batches)[len(self.costs) - num_stages_to_end][1]

    def _costs_of(self, num_stages: int) -> tuple[LaneCosts, ...]:
        return self.costs if len(self.costs) == num_stages else (LaneCosts(),) * num_stages


@lru_cache(maxsize=64)
def _best_order(costs: tuple[LaneCosts, ...], lanes: Lanes, num_micro_batches: int) -> Order:
    """Where lanes have several stages, messages may come long before they are used, as the order has it: if a lane has no
    memory for them it gets as much less for micro-batches.
    """
    if len(lanes) == len(costs):
        return _fastest_within(costs, lanes, num_micro_batches)
    limits = [cost.limit_bytes for cost in costs]
    for _ in range(_MAX_TRIES):
        limited = tuple(replace(cost, limit_bytes=limit) for cost, limit in zip(costs, limits, strict=True))
        order = _fastest_within(limited, lanes, num_micro_batches)
        waiting = waiting_in(
            order, [cost.message_bytes for cost in costs], [cost.gradient_bytes for cost in costs]
        )
        is_over = False
        for program, lane in zip(order, lanes, strict=True):
            allowed = sum(costs[stage].limit_bytes for stage in lane)
            over = most_held(program, costs) + sum(waiting[stage] for stage in lane) - allowed
            if over > 0:
                is_over = True
                for stage in lane:
                    # Twice: with less memory other messages come early.
                    limits[stage] -= 2 * over / len(lane)
        if not is_over:
            break
    return order


def _fastest_within(costs: tuple[LaneCosts, ...], lanes: Lanes, num_micro_batches: int) -> Order:
    best, shortest = None, _INFINITY
    enough = lower_bound_seconds(costs, num_micro_batches, lanes) * (1 + _NEAR)
    is_chain = len(lanes) == len(costs)
    for rule in _RULES if is_chain else _LANE_RULES:
        limit = shortest * (1 + _NEAR_RUN) if is_chain else shortest
        found = list_order(costs, lanes, num_micro_batches, rule, limit_seconds=limit)
        if found is None or found.seconds > limit:
            continue
        seconds = _seconds_of(found.order, costs) if is_chain else found.seconds
        if seconds < shortest * (1 - 1e-9):
            best, shortest = found.order, seconds
        if shortest <= enough:
            break
    if best is not None:
        return best
    return safe_order(lanes, num_micro_batches, splits_backward=True)


def _seconds_of(order: Order, costs: Sequence[LaneCosts]) -> float:
    columns = (
        [cost.forward for cost in costs],
        [cost.inputs + cost.weights for cost in costs],
        [0.0, *(cost.message for cost in costs[1:])],
        [0.0, *(cost.gradient for cost in costs[1:])],
        [cost.weights for cost in costs],
    )
    found = order_seconds(order, *map(np.array, columns))
    return _INFINITY if found is None else found


SCHEDULE = ListScheduled(
    name="list_scheduled", eager_backward=True, splits_backward=True, is_made_for_plans=True
)
