"""An order made for one plan: by list scheduling over the plan's own seconds, within its memory.

In: of each stage the seconds of F, I, W and of its messages, and the bytes that it may hold. Out: an order. Each lane
does what has come, by a rule, as soon as it is free; a rule says what comes first, and how long a gap must be for a W
to fill it. Of the orders that a few rules make, the one whose step is shortest is taken (Qi et al. 2023, "Zero Bubble
Pipeline Parallelism", make theirs so, with other rules). Micro-batches stay in sequence, so gradients are summed as under
1F1B.

Nothing hangs: a lane with a forward or a backward that has come does it, unless memory forbids; then it runs a W, or
there is none to run and the forward waits for a backward, which needs no memory that its forward had not left for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rannc_backend.ir.action import Action, ActionKind
from rannc_backend.schedule.chain import order_seconds
from rannc_backend.schedule.description import (
    Count,
    Order,
    Schedule,
    forward_of,
    inputs_of,
    weights_of,
    with_split_backwards,
)
from rannc_backend.schedule.one_f_one_b import SCHEDULE as ONE_F_ONE_B

_INFINITY = float("inf")
_NEAR = 1e-3  # of the lower bound: no other rule is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCosts:
    """Seconds of one micro-batch on a stage, `message` and `gradient` of the messages that come to it from the stage
    before and go back there; bytes that one micro-batch holds from F to I and from I to W, and that all may hold.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    message: float = 0.0
    gradient: float = 0.0
    flight_bytes: float = 0.0
    kept_bytes: float = 0.0
    limit_bytes: float = _INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """`most_in_flight`: of the stages that are still to come, as a multiple (0: any number). `forward_first`: until
    so many are in flight. `gap`: a W is begun where nothing is known to come within this part of its seconds.
    """

    most_in_flight: float
    forward_first: bool
    gap: float


_RULES = tuple(
    _Rule(most_in_flight=most, forward_first=first, gap=gap)
    for most, first in ((0.0, False), (1.0, True), (1.5, True), (2.0, True))
    for gap in (0.0, 0.5, 1.0)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListScheduled(Schedule):
    """See the module docstring. `costs`: by stage; without any, all seconds are 1 and memory is no matter."""

    costs: tuple[LaneCosts, ...] = ()

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """See `Schedule`."""
        return _best_order(self._costs_of(num_stages), num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """As the order has it; without costs, all of them."""
        if not self.costs or not isinstance(num_stages_to_end, int):
            return 0 * num_stages_to_end + num_micro_batches
        return self._peaks(num_micro_batches)[len(self.costs) - num_stages_to_end][0]

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """As the order has it; without costs, all of them."""
        if not self.costs or not isinstance(num_stages_to_end, int):
            return 0 * num_stages_to_end + num_micro_batches
        return self._peaks(num_micro_batches)[len(self.costs) - num_stages_to_end][1]

    def held_bytes(
        self, stage: int, num_micro_batches: int, *, flight_bytes: float, kept_bytes: float
    ) -> float:
        """The most that a stage holds at one time from F to I and from I to W, with so many bytes of a micro-batch."""
        counts = _held_by(self._costs_of(len(self.costs)), num_micro_batches)[stage]
        return max(flying * flight_bytes + kept * kept_bytes for flying, kept in counts)

    def _costs_of(self, num_stages: int) -> tuple[LaneCosts, ...]:
        return self.costs if len(self.costs) == num_stages else (LaneCosts(),) * num_stages

    def _peaks(self, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
        found = _held_by(self._costs_of(len(self.costs)), num_micro_batches)
        return tuple((max(f for f, _ in counts), max(k for _, k in counts)) for counts in found)


def lower_bound_seconds(costs: Sequence[LaneCosts], num_micro_batches: int) -> float:
    """Below which no order's step can fall: of each lane, when its first forward can begin, its work, and the shortest
    end after it; and the longest chain of what waits for each other.
    """
    heads = [0.0]
    for cost, following in zip(costs, costs[1:], strict=False):
        heads.append(heads[-1] + cost.forward + following.message)
    back = sum(cost.gradient for cost in costs[1:]) + sum(cost.inputs for cost in costs)
    chain = heads[-1] + costs[-1].forward + back + costs[0].weights
    work = [
        head + num_micro_batches * (cost.forward + cost.inputs + cost.weights)
        for head, cost in zip(heads, costs, strict=True)
    ]
    return max(chain, *work)


@lru_cache(maxsize=64)
def _best_order(costs: tuple[LaneCosts, ...], num_micro_batches: int) -> Order:
    best, shortest = None, _INFINITY
    enough = lower_bound_seconds(costs, num_micro_batches) * (1 + _NEAR)
    for rule in _RULES:
        order = _Run(costs, num_micro_batches, rule).order()
        seconds = _seconds_of(order, costs) if order is not None else _INFINITY
        if seconds < shortest * (1 - 1e-9):
            best, shortest = order, seconds
        if shortest <= enough:
            break
    if best is not None:
        return best
    # 1F1B with each W right behind its I cannot get stuck.
    lanes = ONE_F_ONE_B.order(len(costs), num_micro_batches)
    return tuple(with_split_backwards(lane, 0) for lane in lanes)


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


@lru_cache(maxsize=64)
def _held_by(costs: tuple[LaneCosts, ...], num_micro_batches: int) -> tuple[frozenset[tuple[int, int]], ...]:
    """By stage: how many micro-batches are in flight and how many kept, all pairs that occur."""
    found = []
    for lane in _best_order(costs, num_micro_batches):
        in_flight = kept = 0
        pairs = {(0, 0)}
        for action in lane:
            in_flight += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD_INPUT)
            kept += (action.kind is ActionKind.BACKWARD_INPUT) - (action.kind is ActionKind.BACKWARD_WEIGHT)
            pairs.add((in_flight, kept))
        found.append(frozenset(pairs))
    return tuple(found)


@dataclass(slots=True)
class _Channel:
    """Messages to a neighbour, as `lowering.lower` has them travel: a receive is posted when the message before it is used,
    and no more than two are on their way.
    """

    seconds: float
    sent: list[float]  # by micro-batch
    posted: list[float]
    arrived: list[float]

    @classmethod
    def of(cls, seconds: float, number: int) -> _Channel:
        empty = [_INFINITY] * number
        return cls(seconds, [*empty], [0.0, *empty[1:]], [*empty])

    def send(self, micro_batch: int, now: float) -> float:
        """When it arrives, if that is known."""
        self.sent[micro_batch] = now
        return self._arrive(micro_batch)

    def use(self, micro_batch: int, now: float) -> float:
        """The message is used: when the next one arrives, if that is known."""
        following = micro_batch + 1
        if following == len(self.posted):
            return _INFINITY
        self.posted[following] = now
        return self._arrive(following)

    def _arrive(self, micro_batch: int) -> float:
        before = self.arrived[micro_batch - 1] if micro_batch else 0.0
        begin = max(self.sent[micro_batch], self.posted[micro_batch], before)
        self.arrived[micro_batch] = begin + self.seconds
        return self.arrived[micro_batch]

    def room_for(self, micro_batch: int) -> float:
        """When this message may be made."""
        return self.arrived[micro_batch - 2] if micro_batch >= 2 else 0.0


@dataclass(slots=True)
class _Lane:
    """What a lane has done (numbers of F, I and W), and its channels: values come from the stage before, gradients from
    the one after it.
    """

    cost: LaneCosts
    most_in_flight: float
    number: int
    values: _Channel | None
    following_values: _Channel | None
    gradients: _Channel | None
    following_gradients: _Channel | None
    forward_ends: list[float] = field(default_factory=list)
    order: list[Action] = field(default_factory=list)
    num_inputs: int = 0
    num_weights: int = 0
    free: float = 0.0

    @property
    def num_forwards(self) -> int:
        return len(self.forward_ends)

    def held(self) -> float:
        in_flight, kept = self.num_forwards - self.num_inputs, self.num_inputs - self.num_weights
        return in_flight * self.cost.flight_bytes + kept * self.cost.kept_bytes

    def comes(self) -> Iterator[tuple[float, ActionKind]]:
        """When the next I and the next forward can begin, if memory lets them."""
        cost = self.cost
        if self.num_inputs < self.num_forwards:
            m, grows = self.num_inputs, cost.kept_bytes - cost.flight_bytes
            if self.num_weights == m or self.held() + grows <= cost.limit_bytes:
                come = self.forward_ends[m]
                if self.following_gradients is not None:
                    come = self.following_gradients.arrived[m]
                yield (
                    max(come, self.gradients.room_for(m) if self.gradients else 0.0),
                    (ActionKind.BACKWARD_INPUT),
                )
        if self.num_forwards < self.number and self.num_forwards - self.num_inputs < self.most_in_flight:
            m, needed = self.num_forwards, self.held() + max(cost.flight_bytes, cost.kept_bytes)
            if needed <= cost.limit_bytes or self.num_weights == m:
                come = self.values.arrived[m] if self.values else 0.0
                room = self.following_values.room_for(m) if self.following_values else 0.0
                yield max(come, room), ActionKind.FORWARD


class _Run:
    """One run of all lanes by one rule."""

    def __init__(self, costs: Sequence[LaneCosts], num_micro_batches: int, rule: _Rule) -> None:
        self.rule = rule
        channels = [
            (_Channel.of(cost.message, num_micro_batches), _Channel.of(cost.gradient, num_micro_batches))
            for cost in costs[1:]
        ]
        ends: list[tuple[_Channel | None, _Channel | None]] = [(None, None), *channels, (None, None)]
        self.lanes = [
            _Lane(
                cost=cost,
                most_in_flight=rule.most_in_flight * (len(costs) - stage) or _INFINITY,
                number=num_micro_batches,
                values=ends[stage][0],
                following_values=ends[stage + 1][0],
                gradients=ends[stage][1],
                following_gradients=ends[stage + 1][1],
            )
            for stage, cost in enumerate(costs)
        ]

    def order(self) -> Order | None:
        """None where the lanes get stuck."""
        waiting = [(0.0, stage) for stage in range(len(self.lanes))]
        while waiting:
            now, stage = heapq.heappop(waiting)
            lane = self.lanes[stage]
            if now < lane.free:
                continue  # it was busy when something came; it looks again when it is free
            for time, other in self._decide(stage, lane, now):
                if time < _INFINITY and 0 <= other < len(self.lanes):
                    heapq.heappush(waiting, (max(time, self.lanes[other].free), other))
        if any(lane.num_weights < lane.number for lane in self.lanes):
            return None
        return tuple(tuple(lane.order) for lane in self.lanes)

    def _decide(self, stage: int, lane: _Lane, now: float) -> Iterator[tuple[float, int]]:
        """Let a free lane do something; who should look when."""
        coming = {kind: time for time, kind in lane.comes()}
        there = [kind for kind, time in coming.items() if time <= now]
        soonest = min(coming.values(), default=_INFINITY)
        if there:
            is_forward = ActionKind.FORWARD in there and (self.rule.forward_first or len(there) == 1)
            yield from self._forward(stage, lane, now) if is_forward else self._inputs(stage, lane, now)
        elif lane.num_weights < lane.num_inputs and soonest - now >= self.rule.gap * lane.cost.weights:
            lane.order.append(weights_of(stage, lane.num_weights))
            lane.num_weights += 1
            lane.free = now + lane.cost.weights
        else:
            yield soonest, stage
            return
        yield lane.free, stage

    def _forward(self, stage: int, lane: _Lane, now: float) -> Iterator[tuple[float, int]]:
        m = lane.num_forwards
        lane.order.append(forward_of(stage, m))
        lane.free = now + lane.cost.forward
        lane.forward_ends.append(lane.free)
        if lane.values is not None:
            yield lane.values.use(m, now), stage - 1  # there is room for another
        if lane.following_values is not None:
            yield lane.following_values.send(m, lane.free), stage + 1

    def _inputs(self, stage: int, lane: _Lane, now: float) -> Iterator[tuple[float, int]]:
        m = lane.num_inputs
        lane.order.append(inputs_of(stage, m))
        lane.num_inputs += 1
        lane.free = now + lane.cost.inputs
        if lane.following_gradients is not None:
            yield lane.following_gradients.use(m, now), stage + 1
        if lane.gradients is not None:
            yield lane.gradients.send(m, lane.free), stage - 1


SCHEDULE = ListScheduled(
    name="list_scheduled", eager_backward=True, splits_backward=True, is_made_for_plans=True
)
