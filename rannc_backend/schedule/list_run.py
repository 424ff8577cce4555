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
from dataclasses import dataclass

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
_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(4)
_MAKE = (forward_of, backward_of, inputs_of, weights_of)
_Done = tuple[int, int, int]


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


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """What a run made. `programs`: by lane, kind, stage and micro-batch of each computation."""

    programs: tuple[list[_Done], ...]
    seconds: float

    @property
    def order(self) -> Order:
        """The programs as an order."""
        return tuple(
            tuple(_MAKE[kind](stage, number) for kind, stage, number in lane) for lane in self.programs
        )


def list_order(
    costs: Sequence[LaneCosts],
    lanes: Lanes,
    num_micro_batches: int,
    rule: Rule,
    *,
    splits_backward: bool = True,
    limit_seconds: float = _INFINITY,
) -> Listed | None:
    """The order that lanes come to by a rule; None where they get stuck, or when it is seen to take more than the limit."""
    run = _Run(costs, lanes, num_micro_batches, rule, splits_backward)
    return run.run() if run.follow(limit_seconds) else None


def fastest_order(
    costs: Sequence[LaneCosts],
    lanes: Lanes,
    num_micro_batches: int,
    rules: Sequence[Rule],
    *,
    splits_backward: bool = True,
) -> Order:
    """The order of the rule whose run is shortest, or `safe_order` where all get stuck."""
    best: Listed | None = None
    for rule in rules:
        limit = _INFINITY if best is None else best.seconds
        run = list_order(
            costs, lanes, num_micro_batches, rule, splits_backward=splits_backward, limit_seconds=limit
        )
        if run is not None and run.seconds < limit:
            best = run
    return (
        safe_order(lanes, num_micro_batches, splits_backward=splits_backward) if best is None else best.order
    )


def safe_order(lanes: Lanes, num_micro_batches: int, *, splits_backward: bool) -> Order:
    """1F1B, with each W right behind its I: it cannot get stuck."""
    chain = ONE_F_ONE_B.order(sum(map(len, lanes)), num_micro_batches)
    return merged(tuple(with_split_backwards(lane, 0) for lane in chain) if splits_backward else chain, lanes)


def lower_bound_seconds(
    costs: Sequence[LaneCosts],
    num_micro_batches: int,
    lanes: Lanes | None = None,
    reductions: Sequence[float] | None = None,
) -> float:
    """Below which no order's step can fall, whether backwards have two parts or one: of each lane, when its first forward
    can begin, its work, and the shortest end after that; and the longest chain of what waits for each other.

    Args:
        lanes: the stages of each; None: each stage is a lane.
        reductions: by stage, how long after its last computation its gradients are reduced; None: they are at once.
    """
    lanes, reductions = lanes or one_stage_each(len(costs)), reductions or [0.0] * len(costs)
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
        cost.weights + after for cost, after in zip(costs, reductions, strict=True)
    ]  # after an I of the same stage
    down = heads[-1] + costs[-1].forward + costs[-1].inputs + tails[-1]
    bounds = [down - tail + end for tail, end in zip(tails, ends, strict=True)]
    for lane in lanes:
        work = num_micro_batches * sum(costs[stage].forward + costs[stage].inputs for stage in lane)
        weights = num_micro_batches * sum(costs[stage].weights for stage in lane)
        first = min(lane)  # it has the first F and the last I
        after_inputs = max(tails[first] + ends[0], ends[first])
        after_all = min(reductions[stage] for stage in lane)
        bounds.append(heads[first] + work + max(after_inputs, weights + after_all))
    return max(bounds)


class _Channels:
    """Messages of one direction, as `lowering.lower_lanes` has them travel: a receive is posted when the message before it
    is used, or, where lanes have several stages (`is_early`), before it is sent; and no more than two are on their way.
    Lists are by the stage that receives, then by micro-batch. `is_local`: sender and receiver are stages of one lane;
    nothing travels.
    """

    __slots__ = ("arrived", "is_early", "is_local", "number", "posted", "seconds", "sent")

    def __init__(
        self, seconds: Sequence[float], is_local: Sequence[bool], number: int, *, is_early: bool
    ) -> None:
        self.seconds, self.is_local, self.number, self.is_early = seconds, is_local, number, is_early
        self.sent, self.posted, self.arrived = ([[_INFINITY] * number for _ in seconds] for _ in range(3))
        for posted in self.posted:
            posted[:] = [0.0] * number if is_early else [0.0, *posted[1:]]

    def send(self, receiver: int, micro_batch: int, now: float) -> float:
        """When it arrives, if that is known."""
        self.sent[receiver][micro_batch] = now
        return self._arrive(receiver, micro_batch)

    def use(self, receiver: int, micro_batch: int, now: float) -> float:
        """The message is used: when the next one arrives, if that is known."""
        following = micro_batch + 1
        if following == self.number or self.is_early:
            return _INFINITY  # posted long ago: sending it says when it arrives
        self.posted[receiver][following] = now
        return self._arrive(receiver, following)

    def _arrive(self, receiver: int, micro_batch: int) -> float:
        arrived = self.arrived[receiver]
        begin = self.sent[receiver][micro_batch]
        if self.is_local[receiver]:
            arrived[micro_batch] = begin
            return begin
        posted = self.posted[receiver][micro_batch]
        if posted > begin:
            begin = posted
        if micro_batch and arrived[micro_batch - 1] > begin:
            begin = arrived[micro_batch - 1]
        arrived[micro_batch] = begin = begin + self.seconds[receiver]
        return begin

    def ready(self, sender_waits: int, micro_batch: int, come: float) -> float:
        """When what has come may be computed, of which a message goes to that receiver: there is room for it when the one
        before the last has arrived.
        """
        if micro_batch < 2 or self.is_local[sender_waits]:
            return come
        room = self.arrived[sender_waits][micro_batch - 2]
        return room if room > come else come


class _Run:
    """One run of all lanes by one rule. Lists are by stage; what lanes have together is by lane."""

    def __init__(
        self, costs: Sequence[LaneCosts], lanes: Lanes, number: int, rule: Rule, splits_backward: bool
    ) -> None:
        self.costs, self.lanes, self.number, self.rule = costs, lanes, number, rule
        self.splits_backward = splits_backward
        self.group = -(-number // max(1, number // len(lanes)))
        is_early = len(lanes) < len(costs)
        self.lane_of = [0] * len(costs)
        for place, lane in enumerate(lanes):
            for stage in lane:
                self.lane_of[stage] = place
        pairs = list(zip(self.lane_of, self.lane_of[1:], strict=False))
        same = [one == other for one, other in pairs]
        # Values come to stages but the first, gradients to all but the last.
        self.values = _Channels(
            [0.0, *(cost.message for cost in costs[1:])], [False, *same], number, is_early=is_early
        )
        self.gradients = _Channels(
            [*(cost.gradient for cost in costs[1:]), 0.0], [*same, False], number, is_early=is_early
        )
        self.forward_ends: list[list[float]] = [[] for _ in costs]
        self.num_forwards, self.num_inputs, self.num_weights = ([0] * len(costs) for _ in range(3))
        self.held_by_stage = [0.0] * len(costs)
        self.held = [0.0] * len(lanes)
        self.num_in_flight, self.num_kept = [0] * len(lanes), [0] * len(lanes)
        self.free = [0.0] * len(lanes)
        self.programs: tuple[list[_Done], ...] = tuple([] for _ in lanes)
        self.most_in_flight = [
            self._most_in_flight(place, lane) or _INFINITY for place, lane in enumerate(lanes)
        ]
        self.limits = [sum(costs[stage].limit_bytes for stage in lane) for lane in lanes]
        self.growth = [cost.kept_bytes - cost.flight_bytes for cost in costs]
        # What an I needs more than it frees, at most.
        self.most_growth = [max(0.0, *(self.growth[stage] for stage in lane)) for lane in lanes]

    def _most_in_flight(self, place: int, lane: Sequence[int]) -> float:
        """See `Rule`."""
        if self.rule.by_groups:
            # What Megatron's schedule has, and a few more, without which lanes of different speeds wait for each other.
            ahead = 2 * (len(self.lanes) - 1 - place) + (len(lane) - 1) * self.group + 1
            return self.rule.most_in_flight / 2 * (ahead + min(_FEW, (len(self.lanes) + len(lane)) // 2 + 1))
        num_stages = len(self.costs)
        return self.rule.most_in_flight * sum(num_stages - stage for stage in lane) / len(lane)

    def run(self) -> Listed:
        """What the lanes have done."""
        return Listed(self.programs, max(self.free))

    def follow(self, limit_seconds: float) -> bool:
        """Let the lanes do all there is. False: they get stuck, or one cannot have done its work within the limit."""
        each = [cost.forward + cost.inputs + cost.weights for cost in self.costs]
        left = [self.number * sum(each[stage] for stage in lane) for lane in self.lanes]
        waiting = [(0.0, place) for place in range(len(self.lanes))]
        free = self.free
        while waiting:
            now, place = heapq.heappop(waiting)
            if now < free[place]:
                continue  # it was busy when something came; it looks again when it is free
            chosen, soonest = self._choose(place, now)
            if chosen < 0:
                chosen = self._choose_weights(place, soonest - now)
                if chosen < 0:
                    if soonest < _INFINITY:
                        heapq.heappush(waiting, (max(soonest, free[place]), place))
                    continue
                self._weights(place, chosen, now)
            else:
                for time, other in self._do(place, chosen, now):
                    if time < _INFINITY:
                        heapq.heappush(waiting, (max(time, free[other]), other))
            left[place] -= free[place] - now
            if free[place] + left[place] > limit_seconds:
                return False
            heapq.heappush(waiting, (free[place], place))
        return all(done == self.number for done in self.num_weights)

    def _choose(self, place: int, now: float) -> tuple[int, float]:
        """What a free lane does next of what has come, twice the stage and one more for a forward, or -1; and when the next
        comes.
        """
        chosen, least, soonest = -1, None, _INFINITY
        forward_first = self.rule.forward_first
        nothing_kept, held, limit = not self.num_kept[place], self.held[place], self.limits[place]
        last = len(self.costs) - 1
        for position, stage in enumerate(self.lanes[place]):
            m, forwards = self.num_inputs[stage], self.num_forwards[stage]
            if m < forwards and (nothing_kept or held + self.growth[stage] <= limit):
                come = (self.forward_ends if stage == last else self.gradients.arrived)[stage][m]
                time = self.gradients.ready(stage - 1, m, come) if stage else come
                soonest = time if time < soonest else soonest
                if time <= now:
                    key = (int(forward_first), *self._sequence(stage, m, is_forward=False))
                    if least is None or key < least:
                        chosen, least = 2 * stage, key
            if forwards < self.number and self._may_forward(place, position, stage, forwards):
                come = self.values.arrived[stage][forwards] if stage else 0.0
                time = self.values.ready(stage + 1, forwards, come) if stage < last else come
                soonest = time if time < soonest else soonest
                if time <= now:
                    key = (int(not forward_first), *self._sequence(stage, forwards, is_forward=True))
                    if least is None or key < least:
                        chosen, least = 2 * stage + 1, key
        return chosen, soonest

    def _may_forward(self, place: int, position: int, stage: int, micro_batch: int) -> bool:
        """Whether the rule and memory let a stage run its next forward."""
        if not position and self.num_in_flight[place] >= self.most_in_flight[place]:
            return False
        limit = self.limits[place]
        if limit == _INFINITY:
            return True
        needed = self.held[place] + self.costs[stage].flight_bytes + self.most_growth[place]
        lane = self.lanes[place]
        if not position and len(lane) > 1:
            needed += sum(
                (micro_batch + 1 - self.num_forwards[later]) * self.costs[later].flight_bytes
                for later in lane[1:]
            )
        if needed <= limit:
            return True
        # The oldest micro-batch of the lane may have all memory.
        return not self.num_kept[place] and all(self.num_inputs[other] >= micro_batch for other in lane)

    def _sequence(self, stage: int, m: int, *, is_forward: bool) -> tuple[int, ...]:
        """What comes first of its kind has the least."""
        if self.rule.by_groups:
            return m // self.group, stage if is_forward else -stage, m
        return (-stage,) if is_forward else (m, -stage)

    def _choose_weights(self, place: int, idle_seconds: float) -> int:
        """The stage of the W that a lane runs before the next thing comes, or -1."""
        if not self.num_kept[place]:
            return -1
        done = self.num_weights
        kept = [stage for stage in self.lanes[place] if done[stage] < self.num_inputs[stage]]
        if idle_seconds < self.rule.gap * self.costs[kept[-1]].weights:
            return -1
        return min(kept, key=lambda stage: (done[stage], -stage))

    def _weights(self, place: int, stage: int, now: float) -> None:
        self.programs[place].append((_WEIGHTS, stage, self.num_weights[stage]))
        self.num_weights[stage] += 1
        self.num_kept[place] -= 1
        self.free[place] = now + self.costs[stage].weights
        self._count_held(place, stage)

    def _do(self, place: int, chosen: int, now: float) -> Iterator[tuple[float, int]]:
        """Run a forward or an I; which lane should look when."""
        stage, is_forward = divmod(chosen, 2)
        cost = self.costs[stage]
        if is_forward:
            m = self.num_forwards[stage]
            self.programs[place].append((_FORWARD, stage, m))
            self.free[place] = end = now + cost.forward
            self.forward_ends[stage].append(end)
            self.num_forwards[stage] += 1
            self.num_in_flight[place] += 1
            channels, sender, receiver = self.values, stage - 1, stage + 1
        else:
            m = self.num_inputs[stage]
            self.programs[place].append((_INPUTS if self.splits_backward else _BACKWARD, stage, m))
            self.num_inputs[stage] += 1
            self.num_in_flight[place] -= 1
            end = now + cost.inputs
            if self.splits_backward:
                self.num_kept[place] += 1
            else:
                self.num_weights[stage] += 1
                end += cost.weights
            self.free[place] = end
            channels, sender, receiver = self.gradients, stage + 1, stage - 1
        self._count_held(place, stage)
        if 0 <= sender < len(self.costs):
            yield channels.use(stage, m, now), self.lane_of[sender]  # there is room for another
        if 0 <= receiver < len(self.costs):
            yield channels.send(receiver, m, end), self.lane_of[receiver]

    def _count_held(self, place: int, stage: int) -> None:
        cost, inputs = self.costs[stage], self.num_inputs[stage]
        self.held_by_stage[stage] = (self.num_forwards[stage] - inputs) * cost.flight_bytes + (
            inputs - self.num_weights[stage]
        ) * cost.kept_bytes
        self.held[place] = sum(self.held_by_stage[each] for each in self.lanes[place])


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
