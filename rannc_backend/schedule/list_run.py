"""List scheduling: lanes do what has come, by a rule, as soon as they are free.

In: of each stage the seconds of F, I, W and of its messages, and the bytes that it may hold; the stages of each lane; a
rule. Out: the order that the run makes, and how long it takes. Micro-batches stay in sequence on each stage, so gradients
are summed as under 1F1B. Where backwards are not split, I is the whole backward.

Nothing hangs: a lane with a forward or a backward that has come does it, unless memory forbids. Then it runs a W; or
there is none to run, and the forward waits for a backward, which needs no memory that its forward had not left for it. A
forward of the first stage of a lane leaves room for the others. A run that gets stuck all the same has no order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rannc_backend.ir.action import Action
from rannc_backend.schedule.description import (
    Lanes,
    Order,
    backward_of,
    forward_of,
    inputs_of,
    one_stage_each,
    weights_of,
    with_split_backwards,
)
from rannc_backend.schedule.one_f_one_b import SCHEDULE as ONE_F_ONE_B
from rannc_backend.schedule.orders import IN_FLIGHT, KEPT, merged

_INFINITY = float("inf")
_FEW = 6  # micro-batches of one of a lane's stages


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCosts:
    """Seconds of one micro-batch on a stage, `message` and `gradient` of the messages that come to it from the stage
    before and go back there; bytes that one micro-batch holds from F to I and from I to W, and that all may hold: of a
    lane, what its stages may hold together, with messages that have come early, of the sizes of the two.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    message: float = 0.0
    gradient: float = 0.0
    flight_bytes: float = 0.0
    kept_bytes: float = 0.0
    limit_bytes: float = _INFINITY
    message_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a lane does first.

    `most_in_flight`: of the stages that are still to come, as a multiple (0: any number). `forward_first`: until
    so many are in flight. `gap`: a W is begun where nothing is known to come within this part of its seconds.
    `by_groups`: micro-batches come in equal groups, of as many as there are lanes at least: a lane with several stages
    runs its first one for all of a group, then the next; and its backwards likewise, from the last one. A stage is then
    never without a micro-batch of a group when it begins with it. Else what comes first is of the stage that is nearest to
    the end, and `most_in_flight` for groups is a multiple of half of what is then needed.
    """

    most_in_flight: float
    forward_first: bool
    gap: float = 0.0
    by_groups: bool = False


class Listed(NamedTuple):
    """What a run made."""

    order: Order
    seconds: float


def list_order(
    costs: Sequence[LaneCosts],
    lanes: Lanes,
    num_micro_batches: int,
    rule: Rule,
    *,
    splits_backward: bool = True,
) -> Listed | None:
    """The order that lanes come to by a rule; None where they get stuck."""
    return _Run(costs, lanes, num_micro_batches, rule, splits_backward).run()


def fastest_order(
    costs: Sequence[LaneCosts],
    lanes: Lanes,
    num_micro_batches: int,
    rules: Sequence[Rule],
    *,
    splits_backward: bool = True,
) -> Order:
    """The order of the rule whose run is shortest, or `safe_order` where all get stuck."""
    runs = [
        list_order(costs, lanes, num_micro_batches, rule, splits_backward=splits_backward) for rule in rules
    ]
    found = [run for run in runs if run is not None]
    if not found:
        return safe_order(lanes, num_micro_batches, splits_backward=splits_backward)
    return min(found, key=lambda run: run.seconds).order


def safe_order(lanes: Lanes, num_micro_batches: int, *, splits_backward: bool) -> Order:
    """1F1B, with each W right behind its I: it cannot get stuck."""
    chain = ONE_F_ONE_B.order(sum(map(len, lanes)), num_micro_batches)
    return merged(tuple(with_split_backwards(lane, 0) for lane in chain) if splits_backward else chain, lanes)


def lower_bound_seconds(
    costs: Sequence[LaneCosts],
    num_micro_batches: int,
    lanes: Lanes | None = None,
    late: Sequence[float] | None = None,
) -> float:
    """Below which no order's step can fall, whether backwards have two parts or one: of each lane, when its first forward
    can begin, its work, and the shortest end after that; and the longest chain of what waits for each other.

    Args:
        lanes: the stages of each; None: each stage is a lane.
        late: by stage, how long after its last computation its gradients are reduced; None: they are at once.
    """
    lanes, late = lanes or one_stage_each(len(costs)), late or [0.0] * len(costs)
    lane_of = {stage: number for number, lane in enumerate(lanes) for stage in lane}
    heads, tails = (
        [0.0],
        [0.0],
    )  # until the first F may begin; from the end of an I to that of the first stage's
    for stage, (cost, following) in enumerate(zip(costs, costs[1:], strict=False)):
        travels = lane_of[stage] != lane_of[stage + 1]
        heads.append(heads[-1] + cost.forward + travels * following.message)
        tails.append(tails[-1] + cost.inputs + travels * following.gradient)
    ends = [
        cost.weights + after for cost, after in zip(costs, late, strict=True)
    ]  # after an I of the same stage
    down = heads[-1] + costs[-1].forward + costs[-1].inputs + tails[-1]
    bounds = [down - tail + end for tail, end in zip(tails, ends, strict=True)]
    for lane in lanes:
        work = num_micro_batches * sum(costs[stage].forward + costs[stage].inputs for stage in lane)
        weights = num_micro_batches * sum(costs[stage].weights for stage in lane)
        first = min(lane)  # it has the first F and the last I
        after_inputs = max(tails[first] + ends[0], ends[first])
        after_all = min(late[stage] for stage in lane)
        bounds.append(heads[first] + work + max(after_inputs, weights + after_all))
    return max(bounds)


@dataclass(slots=True)
class _Channel:
    """Messages to a neighbour, as `lowering.lower_lanes` has them travel: a receive is posted when the message before it is
    used, or, where lanes have several stages, before it is sent; and no more than two are on their way. `is_local`: the
    neighbour is a stage of the same lane; nothing travels.
    """

    seconds: float
    is_local: bool
    sent: list[float]  # by micro-batch
    posted: list[float]
    arrived: list[float]

    @classmethod
    def of(cls, seconds: float, number: int, *, is_local: bool, is_early: bool) -> _Channel:
        empty = [_INFINITY] * number
        return cls(seconds, is_local, [*empty], [0.0] * number if is_early else [0.0, *empty[1:]], [*empty])

    def send(self, micro_batch: int, now: float) -> float:
        """When it arrives, if that is known."""
        self.sent[micro_batch] = now
        return self._arrive(micro_batch)

    def use(self, micro_batch: int, now: float) -> float:
        """The message is used: when the next one arrives, if that is known."""
        following = micro_batch + 1
        if following == len(self.posted):
            return _INFINITY
        if self.posted[following] == 0.0:
            return _INFINITY  # posted long ago: sending it says when it arrives
        self.posted[following] = now
        return self._arrive(following)

    def _arrive(self, micro_batch: int) -> float:
        if self.is_local:
            self.arrived[micro_batch] = self.sent[micro_batch]
            return self.arrived[micro_batch]
        before = self.arrived[micro_batch - 1] if micro_batch else 0.0
        begin = max(self.sent[micro_batch], self.posted[micro_batch], before)
        self.arrived[micro_batch] = begin + self.seconds
        return self.arrived[micro_batch]

    def room_for(self, micro_batch: int) -> float:
        """When this message may be made."""
        return self.arrived[micro_batch - 2] if micro_batch >= 2 and not self.is_local else 0.0


@dataclass(slots=True)
class _Stage:
    """What a stage has done (numbers of F, I and W), and its channels: values come from the stage before, gradients from
    the one after it.
    """

    index: int
    lane: int
    cost: LaneCosts
    values: _Channel | None
    following_values: _Channel | None
    gradients: _Channel | None
    following_gradients: _Channel | None
    forward_ends: list[float] = field(default_factory=list)
    num_inputs: int = 0
    num_weights: int = 0

    @property
    def num_in_flight(self) -> int:
        return len(self.forward_ends) - self.num_inputs

    def held(self) -> float:
        return (
            self.num_in_flight * self.cost.flight_bytes
            + (self.num_inputs - self.num_weights) * self.cost.kept_bytes
        )


class _Coming(NamedTuple):
    """Something that a lane could do, and when."""

    time: float
    stage: _Stage
    is_forward: bool


@dataclass(slots=True)
class _Lane:
    """Stages that share ranks, and what they have done together."""

    stages: list[_Stage]
    most_in_flight: float
    limit_bytes: float
    number: int
    order: list[Action] = field(default_factory=list)
    free: float = 0.0

    def comes(self) -> Iterator[_Coming]:
        """When the next I and the next forward of each stage can begin, if memory lets them."""
        held = sum(stage.held() for stage in self.stages)
        nothing_kept = all(stage.num_weights == stage.num_inputs for stage in self.stages)
        for place, stage in enumerate(self.stages):
            cost, m = stage.cost, stage.num_inputs
            if m < len(stage.forward_ends):
                grows = cost.kept_bytes - cost.flight_bytes
                if nothing_kept or held + grows <= self.limit_bytes:
                    come = stage.forward_ends[m]
                    if stage.following_gradients is not None:
                        come = stage.following_gradients.arrived[m]
                    room = stage.gradients.room_for(m) if stage.gradients else 0.0
                    yield _Coming(max(come, room), stage, False)
            m = len(stage.forward_ends)
            if m < self.number and (place or self._num_in_flight() < self.most_in_flight):
                needed = held + cost.flight_bytes + self.most_growth
                if not place:
                    needed += sum(
                        (m + 1 - len(later.forward_ends)) * later.cost.flight_bytes
                        for later in self.stages[1:]
                    )
                if needed <= self.limit_bytes or (nothing_kept and self._is_oldest(m)):
                    come = stage.values.arrived[m] if stage.values else 0.0
                    room = stage.following_values.room_for(m) if stage.following_values else 0.0
                    yield _Coming(max(come, room), stage, True)

    def _num_in_flight(self) -> int:
        return sum(stage.num_in_flight for stage in self.stages)

    @property
    def most_growth(self) -> float:
        """What an I needs more than it frees, at most."""
        return max(0.0, *(stage.cost.kept_bytes - stage.cost.flight_bytes for stage in self.stages))

    def _is_oldest(self, micro_batch: int) -> bool:
        """Whether no earlier micro-batch is anywhere in the lane: it may have all memory."""
        return all(other.num_inputs >= micro_batch for other in self.stages)


class _Run:
    """One run of all lanes by one rule."""

    def __init__(
        self, costs: Sequence[LaneCosts], lanes: Lanes, number: int, rule: Rule, splits_backward: bool
    ) -> None:
        self.rule, self.splits_backward = rule, splits_backward
        self.num_lanes = len(lanes)
        self.group = -(-number // max(1, number // len(lanes)))
        is_early = len(lanes) < len(costs)
        lane_of = {stage: place for place, lane in enumerate(lanes) for stage in lane}
        channels: list[tuple[_Channel | None, _Channel | None]] = [(None, None)]
        for index, cost in enumerate(costs[1:], start=1):
            is_local = lane_of[index] == lane_of[index - 1]
            channels.append(
                (
                    _Channel.of(cost.message, number, is_local=is_local, is_early=is_early),
                    _Channel.of(cost.gradient, number, is_local=is_local, is_early=is_early),
                )
            )
        channels.append((None, None))
        stages = [
            _Stage(
                index=index,
                lane=lane_of[index],
                cost=cost,
                values=channels[index][0],
                following_values=channels[index + 1][0],
                gradients=channels[index][1],
                following_gradients=channels[index + 1][1],
            )
            for index, cost in enumerate(costs)
        ]
        self.stages = stages
        self.lanes = [
            _Lane(
                stages=[stages[stage] for stage in lane],
                most_in_flight=self._most_in_flight(place, lane) or _INFINITY,
                limit_bytes=sum(costs[stage].limit_bytes for stage in lane),
                number=number,
            )
            for place, lane in enumerate(lanes)
        ]

    def _most_in_flight(self, place: int, lane: Sequence[int]) -> float:
        """See `Rule`."""
        if self.rule.by_groups:
            # What Megatron's schedule has, and a few more, without which lanes of different speeds wait for each other.
            ahead = 2 * (self.num_lanes - 1 - place) + (len(lane) - 1) * self.group + 1
            return self.rule.most_in_flight / 2 * (ahead + min(_FEW, (self.num_lanes + len(lane)) // 2 + 1))
        num_stages = len(self.stages)
        return self.rule.most_in_flight * sum(num_stages - stage for stage in lane) / len(lane)

    def run(self) -> Listed | None:
        """None where the lanes get stuck."""
        waiting = [(0.0, place) for place in range(len(self.lanes))]
        while waiting:
            now, place = heapq.heappop(waiting)
            lane = self.lanes[place]
            if now < lane.free:
                continue  # it was busy when something came; it looks again when it is free
            for time, other in self._decide(place, lane, now):
                if time < _INFINITY:
                    heapq.heappush(waiting, (max(time, self.lanes[other].free), other))
        if any(stage.num_weights < lane.number for lane in self.lanes for stage in lane.stages):
            return None
        return Listed(tuple(tuple(lane.order) for lane in self.lanes), max(lane.free for lane in self.lanes))

    def _decide(self, place: int, lane: _Lane, now: float) -> Iterator[tuple[float, int]]:
        """Let a free lane do something; which lane should look when."""
        coming = list(lane.comes())
        there = [each for each in coming if each.time <= now]
        soonest = min((each.time for each in coming), default=_INFINITY)
        kept = [stage for stage in lane.stages if stage.num_weights < stage.num_inputs]
        if there:
            yield from self._do(lane, min(there, key=self._sequence), now)
        elif kept and soonest - now >= self.rule.gap * kept[-1].cost.weights:
            stage = min(kept, key=lambda each: (each.num_weights, -each.index))
            lane.order.append(weights_of(stage.index, stage.num_weights))
            stage.num_weights += 1
            lane.free = now + stage.cost.weights
        else:
            yield soonest, place
            return
        yield lane.free, place

    def _sequence(self, coming: _Coming) -> tuple[int, ...]:
        """What comes first has the least."""
        stage = coming.stage
        after = int(self.rule.forward_first != coming.is_forward)
        m = len(stage.forward_ends) if coming.is_forward else stage.num_inputs
        if self.rule.by_groups:
            return after, m // self.group, stage.index if coming.is_forward else -stage.index, m
        return (after, -stage.index) if coming.is_forward else (after, m, -stage.index)

    def _do(self, lane: _Lane, coming: _Coming, now: float) -> Iterator[tuple[float, int]]:
        stage = coming.stage
        if coming.is_forward:
            m = len(stage.forward_ends)
            lane.order.append(forward_of(stage.index, m))
            lane.free = now + stage.cost.forward
            stage.forward_ends.append(lane.free)
            used, sent = stage.values, stage.following_values
            sender, receiver = stage.index - 1, stage.index + 1
        else:
            m = stage.num_inputs
            make = inputs_of if self.splits_backward else backward_of
            lane.order.append(make(stage.index, m))
            stage.num_inputs += 1
            lane.free = now + stage.cost.inputs
            if not self.splits_backward:
                stage.num_weights += 1
                lane.free += stage.cost.weights
            used, sent = stage.following_gradients, stage.gradients
            sender, receiver = stage.index + 1, stage.index - 1
        if used is not None:
            yield used.use(m, now), self.stages[sender].lane  # there is room for another
        if sent is not None:
            yield sent.send(m, lane.free), self.stages[receiver].lane


def limits_in_lane(
    limit_bytes: float, others: Sequence[float], workspaces: Sequence[float]
) -> tuple[float, ...]:
    """What micro-batches may hold in each stage of a lane, of which only the sum counts.

    Args:
        others: what each stage needs beside micro-batches and its workspace.
        workspaces: of each stage; they run one after the other, so that the largest serves all.
    """
    left = (limit_bytes - max(workspaces)) / len(others)
    return tuple(left - other for other in others)


def most_held(program: Sequence[Action], costs: Sequence[LaneCosts]) -> float:
    """Bytes that a lane holds of micro-batches at its fullest moment."""
    held = most = 0.0
    for action in program:
        cost = costs[action.stage]
        held += IN_FLIGHT[action.kind] * cost.flight_bytes + KEPT[action.kind] * cost.kept_bytes
        most = max(most, held)
    return most
