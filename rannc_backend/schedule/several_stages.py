"""Schedules with several stages on each rank.

In: numbers of stages and micro-batches. Out: orders, and which stages a lane has, for any number of micro-batches. Those of
`interleaved` and `zb_v` are made by list scheduling over equal stages (`schedule/list_run.py`), that of `v_half` repeats a
pattern.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from rannc_backend.schedule.description import (
    Count,
    Lanes,
    Order,
    Schedule,
    forward_of,
    inputs_of,
    weights_of,
)
from rannc_backend.schedule.list_run import LaneCosts, Rule, fastest_order
from rannc_backend.schedule.orders import peaks_of

_WHOLE = LaneCosts(forward=1.0, inputs=2.0, weights=0.0)
_INTERLEAVED_RULES = (
    Rule(most_in_flight=2.0, forward_first=True, by_groups=True),
    Rule(most_in_flight=2.0, forward_first=True),
    Rule(most_in_flight=1.5, forward_first=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnLanes(Schedule):
    """What a stage holds is what its order says, not how far it is from the end."""

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """All of them; `in_flight_bounds` says more."""
        return 0 * num_stages_to_end + num_micro_batches

    def in_flight_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """As the order has it."""
        return tuple(flying for flying, _ in peaks_of(self, num_stages, num_micro_batches))

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """All of them; `kept_bounds` says more."""
        return 0 * num_stages_to_end + (num_micro_batches if self.splits_backward else 0)

    def kept_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """As the order has it."""
        return tuple(kept for _, kept in peaks_of(self, num_stages, num_micro_batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(_OwnLanes):
    """1F1B with v stages on each lane, two or more: of p lanes, lane l runs stages l, l + p, ... (Narayanan et al. 2021,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").

    The pipeline fills in stages of a v-th of the length, so ranks compute nothing for a v-th of the time under 1F1B, and
    messages are v times as many. The order is that of list scheduling with equal stages, of the fastest of a few rules:
    micro-batches in equal groups of p or more, or forwards of a lane's later stages before those of its earlier ones. With
    p micro-batches or more, ranks compute nothing for (p - 1) (F + B) of such a stage, or little more.
    """

    def lanes(self, num_stages: int) -> Lanes:
        """See `Schedule`: lane l of p has stages l, l + p, ..."""
        count = num_stages // self.stages_per_lane
        return tuple(tuple(range(lane, num_stages, count)) for lane in range(count))

    def with_stages_per_lane(self, count: int) -> Schedule | None:
        """See `Schedule`: any number from two."""
        return replace(self, stages_per_lane=count) if count >= 2 else None

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _interleaved(self.lanes(num_stages), num_micro_batches)


@lru_cache(maxsize=64)
def _interleaved(lanes: Lanes, num_micro_batches: int) -> Order:
    costs = (_WHOLE,) * sum(map(len, lanes))
    return fastest_order(costs, lanes, num_micro_batches, _INTERLEAVED_RULES, splits_backward=False)


_V_RULES = (
    Rule(most_in_flight=0.0, forward_first=False),
    Rule(most_in_flight=0.0, forward_first=True),
    Rule(most_in_flight=1.5, forward_first=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InAV(_OwnLanes):
    """Two stages on each lane in the shape of a V: of p lanes, lane l runs stages l and 2 p - 1 - l. A micro-batch goes down
    the lanes and comes up again.
    """

    def lanes(self, num_stages: int) -> Lanes:
        """See `Schedule` and the class."""
        return tuple((lane, num_stages - 1 - lane) for lane in range(num_stages // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleV(_InAV):
    """Backwards in two parts (ZB-V of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The first lane has the last stage of a micro-batch, and begins its backward at once. With equal stages and F, I and W of one
    length, ranks compute nothing for (p - 1) F at the begin of a step, and a lane holds what 2 p + 1 stages save of a
    micro-batch: one more than under 1F1B. The order is that of list scheduling with such seconds and such memory, of the fastest
    of a few rules; it takes no F more with up to five lanes, and up to four more with eight, where it was tried. The first stage
    has no I: what its backward computes, all of it, nobody waits for.
    """

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _in_a_v(self.lanes(num_stages), num_micro_batches)


@lru_cache(maxsize=64)
def _in_a_v(lanes: Lanes, num_micro_batches: int) -> Order:
    # One more than 1F1B's first stage has: between an I and its W, both are there.
    limit = len(lanes) + 0.5
    unit = LaneCosts(flight_bytes=1.0, kept_bytes=1.0, limit_bytes=limit)
    first = replace(unit, inputs=0.0, weights=unit.inputs + unit.weights)
    costs = (first,) + (unit,) * (sum(map(len, lanes)) - 1)
    return fastest_order(costs, lanes, num_micro_batches, _V_RULES)


_PERIOD = 6  # F, I and W of two stages, each of one unit
_DOWN, _UP = 1, 2  # units from a micro-batch's computation to that of the next lane, on each way


@dataclass(frozen=True, slots=True, kw_only=True)
class VHalf(_InAV):
    """Half of the memory of 1F1B, on all lanes alike (V-Half of Qi et al. 2024, "Pipeline Parallelism with Controllable
    Memory"), for what would otherwise be computed again.

    A lane begins the computations of each micro-batch one period after those of the one before. What a lane holds is what
    lies between an F and its W: on the way down one unit from lane to lane, on the way up two, so that a first and a last
    stage together hold as many on every lane, p + 3 at most where 1F1B's first lane holds 2 p. With F, I and W of one length
    the pattern leaves no time without work. Where I is longer, the units that a micro-batch waits on its way up take that
    up. Ranks compute nothing for some 1.5 p units at the begin and the end of a step.
    """

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _by_pattern(num_stages // 2, num_micro_batches)


@lru_cache(maxsize=64)
def _by_pattern(num_lanes: int, num_micro_batches: int) -> Order:
    last = 2 * num_lanes - 1
    order = []
    for first, (down, up, inputs_down, inputs_up) in enumerate(_pattern(num_lanes)):
        begins = {
            down: forward_of(first, 0),
            up: forward_of(last - first, 0),
            inputs_down: inputs_of(last - first, 0),
            inputs_up: inputs_of(first, 0),
        }
        for unit, stage in ((inputs_down, last - first), (inputs_up, first)):
            # The W as soon as its lane has nothing else to do.
            taken = {each % _PERIOD for each in begins}
            free = next(each for each in itertools.count(unit + 1) if each % _PERIOD not in taken)
            begins[free] = weights_of(stage, 0)
        units = [
            (unit + number * _PERIOD, replace(action, micro_batch=number))
            for unit, action in begins.items()
            for number in range(num_micro_batches)
        ]
        order.append(tuple(action for _, action in sorted(units, key=lambda each: each[0])))
    return tuple(order)


def _pattern(num_lanes: int) -> list[tuple[int, int, int, int]]:
    """By lane, the units at which its F on the way down and up begin, and its I on the way back, of one micro-batch: as early
    as no two of a lane are in the same unit of a period.
    """
    path = num_lanes - 1
    for waits in sorted(itertools.product(range(_PERIOD), repeat=3), key=sum):
        up = path * _DOWN + 1 + waits[0]
        down_again = up + path * _UP + 1 + waits[1]
        up_again = down_again + path * _DOWN + 1 + waits[2]
        lanes = [
            (
                lane * _DOWN,
                up + (path - lane) * _UP,
                down_again + lane * _DOWN,
                up_again + (path - lane) * _UP,
            )
            for lane in range(num_lanes)
        ]
        if all(len({unit % _PERIOD for unit in units}) == len(units) for units in lanes):
            return lanes
    raise AssertionError("some waits always do: up and up_again 1, down_again 2 modulo 3, all of them apart")


INTERLEAVED = Interleaved(name="interleaved", eager_backward=True, stages_per_lane=2)
ZB_V = ZeroBubbleV(name="zb_v", eager_backward=True, splits_backward=True, stages_per_lane=2)
V_HALF = VHalf(name="v_half", eager_backward=True, splits_backward=True, stages_per_lane=2, saves_memory=True)
