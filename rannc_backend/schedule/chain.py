"""How long a step of a chain of stages takes: the objective of the planner, for one plan or for many at once.

In: seconds of each stage's forward and backward, of the messages between neighbours, and of the all-reduce.
Out: seconds of a step. Terms: a *chain* is a pipeline in which stage s takes part in two channels with stage
s - 1 only: values in, their gradients back; every micro-batch sends one message over each. A *level* is the
time at which a computation would run if all took equally long; computations of one level do not wait for each
other, so they are priced by one numpy operation.

A schedule that does not say its levels has them made from its programs.

These are the recurrences of `progress.run_to_end` on the programs that `lowering.lower` makes (window 1) of
such a chain, and the reductions of `simulator`. Of a stage at one micro-batch: a message starts when it was
sent, the receive was posted (before the computation that uses the message before it) and the message before
it arrived; a computation starts when the one before it on the stage has ended, its message is there, and the
message that the stage sent two before has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.action import ActionKind, Program
from rannc_backend.schedule.description import Level, Order, Schedule
from rannc_backend.schedule.orders import ScheduleName, schedule_named

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def chains_step_seconds(
    forward: Floats,
    backward: Floats,
    message: Floats,
    gradient: Floats,
    allreduce: Floats,
    num_buckets: Floats,
    *,
    num_micro_batches: int,
    schedule: ScheduleName | Schedule,
    weight: Floats | None = None,
) -> Floats:
    """Seconds of one step of many chains of equally many stages, as `simulator.simulate` of the lowered
    programs gives them: all arguments are [chains, stages], the result [chains].

    Columns are seconds. The two messages are those between a stage and the one before it; 0 for the first.
    `backward` includes what is computed again. `allreduce` is of all gradients, once per step, in
    `num_buckets` equal parts that run under the last backward. `weight`: the part of `backward` that a schedule may run
    later, if it splits backwards; None: nothing. Memory: 40 bytes x chains x (stages + 2) x
    (micro-batches + 2).
    """
    assert forward.ndim == 2 and forward.shape[1] >= 1 and num_micro_batches >= 1, (
        f"no chains: {forward.shape}"
    )
    described = schedule_named(schedule) if isinstance(schedule, str) else schedule
    levels = described.levels(forward.shape[1], num_micro_batches)
    if levels is None:
        steps = _steps_of(described, forward.shape[1], num_micro_batches)
        assert steps is not None, f"the order of {described} gets stuck"
        columns = (forward, backward, message, gradient)
        later = np.zeros_like(backward) if weight is None else weight
        return _program_seconds(columns, later, num_buckets, allreduce, steps)
    run = _Run.of(forward, backward, message, gradient, num_micro_batches)
    run.follow(levels, described.forwards_before(forward.shape[1], num_micro_batches))
    ends = run.clock.T
    first_bucket = run.last_start.T + backward / num_buckets
    reduced = np.maximum(first_bucket + allreduce, ends + allreduce / num_buckets)
    return np.maximum(ends, reduced).max(axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """A step of a chain as events: computations that end, messages that arrive. Events are numbered by levels, those of
    one level in any order; event 0 is the begin.

    `levels`: where each level begins, and the end. `waits` [events, 3]: the events that one waits for. `kinds` [events]:
    where its seconds are in the table of `_program_seconds`. `last`: by stage, its last computation.
    """

    levels: tuple[int, ...]
    waits: Ints
    kinds: Ints
    last: Ints


_SECONDS_OF = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.BACKWARD_INPUT: 2,
    ActionKind.BACKWARD_WEIGHT: 3,
}
_MESSAGE, _GRADIENT = 4, 5


def _program_seconds(
    columns: Sequence[Floats], weight: Floats, num_buckets: Floats, allreduce: Floats, steps: _Steps
) -> Floats:
    """[chains] of `chains_step_seconds`, event by event. `columns`: forward, backward, message, gradient."""
    forward, backward, message, gradient = (values.T for values in columns)
    # By kind and stage, as `_SECONDS_OF` and the two messages say.
    table = np.concatenate([forward, backward, backward - weight.T, weight.T, message, gradient])
    times = np.zeros((len(steps.kinds), forward.shape[1]))
    for begin, end in zip(steps.levels, steps.levels[1:], strict=False):
        first, second, third = steps.waits[begin:end].T
        latest = np.maximum(times[first], times[second])
        np.maximum(latest, times[third], out=latest)
        latest += table[steps.kinds[begin:end]]
        times[begin:end] = latest
    ends, duration = times[steps.last], table[steps.kinds[steps.last]]
    first_bucket = ends - duration + duration / num_buckets.T
    reduced = np.maximum(first_bucket + allreduce.T, ends + allreduce.T / num_buckets.T)
    return np.asarray(np.maximum(ends, reduced).max(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LongestPath:
    """What a step of one chain waits for, from its begin to its end.

    `seconds`: of the step; `counts` [8, stages]: how often each of the terms of `longest_path` is on the path. For other
    terms the same path takes `(counts * terms).sum()`, which no step of that schedule is shorter than.
    """

    seconds: float
    counts: Ints


def longest_path(terms: Floats, schedule: Schedule, num_micro_batches: int) -> LongestPath:
    """The longest path through a step of a chain.

    Args:
        terms: [8, stages], seconds: of a forward, a backward, its first and its second part, the message and the gradient
            between a stage and the one before it; how long after the end of the last computation of a stage its
            reductions end if they wait for each other (a - d (1 - 1 / n), with a, n of the reductions and d of that computation),
            and if only the last bucket does (a / n).
    """
    num_stages = terms.shape[1]
    steps = _steps_of(schedule, num_stages, num_micro_batches)
    assert steps is not None, f"the order of {schedule} gets stuck"
    seconds = terms[:6].reshape(-1)
    times = np.zeros(len(steps.kinds))
    for begin, end in zip(steps.levels, steps.levels[1:], strict=False):
        times[begin:end] = times[steps.waits[begin:end]].max(axis=1) + seconds[steps.kinds[begin:end]]
    later = np.concatenate([terms[6:], np.zeros((1, num_stages))]) + times[steps.last]
    which, stage = np.unravel_index(int(later.argmax()), later.shape)
    counts = np.zeros((9, num_stages), dtype=np.int64)
    counts[6 + which, stage] = 1
    event = int(steps.last[stage])
    while event:
        counts[divmod(int(steps.kinds[event]), num_stages)] += 1
        before = steps.waits[event]
        event = int(before[times[before].argmax()])
    return LongestPath(seconds=float(later.max()), counts=counts[:8])


def order_seconds(
    order: Order, forward: Floats, backward: Floats, message: Floats, gradient: Floats, weight: Floats
) -> float | None:
    """Seconds of one step of a chain with this order, without reductions; None where it gets stuck. Arguments as of
    `chains_step_seconds`, of one chain: [stages].
    """
    steps = _steps_of_order(order)
    if steps is None:
        return None
    columns = (forward[None], backward[None], message[None], gradient[None])
    nothing = np.zeros((1, len(order)))
    return float(_program_seconds(columns, weight[None], nothing + 1, nothing, steps)[0])


@lru_cache(maxsize=64)
def _steps_of(schedule: Schedule, num_stages: int, num_micro_batches: int) -> _Steps | None:
    return _steps_of_order(schedule.order(num_stages, num_micro_batches))


def _steps_of_order(order: Order) -> _Steps | None:
    """The events of the programs that `lowering.lower` makes of an order in which lane s runs stage s, by the recurrences
    of the module docstring; None where they wait for each other.
    """
    num_stages = len(order)
    firsts = np.cumsum([1, *map(len, order)])  # by lane, its first event
    num_computes, number = int(firsts[-1]), len(_slots_by_kind(order[0])[0])
    waits = np.zeros((num_computes + 2 * (num_stages - 1) * number, 3), dtype=np.int64)
    kinds = np.zeros(len(waits), dtype=np.int64)
    made = [_slots_by_kind(lane) for lane in order]
    for lane, program in enumerate(order):
        own = slice(firsts[lane], firsts[lane + 1])
        waits[own, 0] = np.append(0, np.arange(firsts[lane], firsts[lane + 1] - 1))
        kinds[own] = [_SECONDS_OF[action.kind] * num_stages + lane for action in program]
    arrival = num_computes
    for stage in range(1, num_stages):
        for kind, source, destination in ((0, stage - 1, stage), (1, stage, stage - 1)):
            sent, used = made[source][kind], made[destination][kind]
            events = arrival + np.arange(number)
            arrival += number
            slots = np.array([used[m] for m in sent])
            making = np.array(list(sent.values())) + firsts[source]
            posted = _posting_slots(slots)
            waits[events, 0] = making
            waits[events, 1] = np.where(posted > 0, firsts[destination] + posted - 1, 0)
            waits[events[1:], 2] = events[:-1]
            kinds[events] = (_GRADIENT if kind else _MESSAGE) * num_stages + stage
            waits[firsts[destination] + slots, 1] = events
            waits[making[2:], 2] = events[:-2]
    return _leveled(waits, kinds, firsts[1:] - 1)


def _slots_by_kind(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """micro-batch -> slot of its forward, and of what gives its gradients to the stage before, as they come."""
    forwards, backwards = dict[int, int](), dict[int, int]()
    for slot, action in enumerate(program):
        if action.kind is ActionKind.FORWARD:
            forwards[action.micro_batch] = slot
        elif action.kind is not ActionKind.BACKWARD_WEIGHT:
            backwards[action.micro_batch] = slot
    return forwards, backwards


def _posting_slots(slots: Ints) -> Ints:
    """Slots before which the receives of a channel are posted, by the slots of their uses, both in the channel's
    sequence: that of the use before it, or an earlier one where a later message is posted earlier.
    """
    by_use = np.argsort(slots)
    wanted = np.empty_like(slots)
    wanted[by_use] = np.append(max(0, int(slots[by_use[0]]) - 1), slots[by_use[:-1]])
    return np.minimum.accumulate(wanted[::-1])[::-1]


def _leveled(waits: Ints, kinds: Ints, last: Ints) -> _Steps | None:
    """The events numbered by how many others they wait for, one after the other; None where some wait for each other."""
    needed = waits.tolist()
    users: list[list[int]] = [[] for _ in needed]
    missing = [0] * len(needed)
    for event in range(1, len(needed)):
        for other in needed[event]:
            if other:
                users[other].append(event)
                missing[event] += 1
    numbered, levels = [0], [1]
    level = [event for event in range(1, len(needed)) if not missing[event]]
    while level:
        numbered += level
        levels.append(len(numbered))
        following = []
        for event in level:
            for user in users[event]:
                missing[user] -= 1
                if not missing[user]:
                    following.append(user)
        level = following
    if len(numbered) < len(needed):
        return None
    new = np.empty(len(needed), dtype=np.int64)
    new[numbered] = np.arange(len(needed))
    return _Steps(tuple(levels), new[waits[numbered]], kinds[numbered], new[last])


def reduction_seconds(backward: Floats, allreduce: Floats, num_buckets: Floats) -> Floats:
    """How long after the end of a stage's last backward its reductions end (0 or more)."""
    # What does not fit takes infinitely long.
    with np.errstate(invalid="ignore"):
        return np.maximum(allreduce - backward + backward / num_buckets, allreduce / num_buckets)


@dataclass(slots=True, eq=False)
class _Run:
    """Times of all chains. Stage s at micro-batch m has row (s + 1) * width + m + 2 of the arrays of times
    [rows, chains].

    The rows around are zero (a time that no maximum notices), so that neighbours need no special cases.
    """

    num_stages: int
    num_micro_batches: int
    forward: Floats  # [stages, chains]
    backward: Floats
    message: Floats  # into the stage
    gradient: Floats  # into the stage, from the one after it
    width: int
    clock: Floats = field(init=False)  # [stages, chains]: end of the last computation
    last_start: Floats = field(init=False)
    forward_end: Floats = field(init=False)
    forward_arrival: Floats = field(init=False)
    before_forward: Floats = field(init=False)  # end of the computation before it on the stage
    backward_end: Floats = field(init=False)
    backward_arrival: Floats = field(init=False)
    before_backward: Floats = field(init=False)

    @classmethod
    def of(
        cls, forward: Floats, backward: Floats, message: Floats, gradient: Floats, num_micro_batches: int
    ) -> _Run:
        into = np.concatenate([gradient[:, 1:], np.zeros((len(gradient), 1))], axis=1)
        num_stages = forward.shape[1]
        forward, backward, message, into = (
            np.ascontiguousarray(values.T) for values in (forward, backward, message, into)
        )
        return cls(
            num_stages, num_micro_batches, forward, backward, message, into, width=num_micro_batches + 2
        )

    def __post_init__(self) -> None:
        num_chains = self.forward.shape[1]
        self.clock = np.zeros((self.num_stages, num_chains))
        self.last_start = np.zeros((self.num_stages, num_chains))
        rows = ((self.num_stages + 2) * self.width, num_chains)
        for name in (
            "forward_end", "forward_arrival", "before_forward", "backward_end", "backward_arrival", "before_backward"
        ):  # fmt: skip
            setattr(self, name, np.zeros(rows))

    def follow(self, levels: Iterable[Level], forwards_before: tuple[int, ...]) -> None:
        """Run everything; see `Schedule.forwards_before`."""
        for level in levels:
            if level.last < level.first:
                continue
            if level.is_forward:
                self._forwards(level.first, level.last, level.number, level.step)
            else:
                self._backwards(level.first, level.last, level.number, level.step, forwards_before)

    def _forwards(self, first: int, last: int, number: int, step: int) -> None:
        """Forwards of stages first, first + step, ... last: micro-batch `number` of the first, one less of
        each next.
        """
        count = (last - first) // step + 1
        begin, stride = (first + 1) * self.width + number + 2, step * self.width - 1

        def rows(times: Floats, shift: int) -> Floats:
            start = begin + shift
            return times[start : start + (count - 1) * stride + 1 : stride]

        stages = slice(first, last + 1, step)
        before = self.clock[stages]
        arrival = np.maximum(rows(self.forward_end, -self.width), rows(self.before_forward, -1))
        np.maximum(arrival, rows(self.forward_arrival, -1), out=arrival)
        arrival += self.message[stages]
        start = np.maximum(before, arrival)
        np.maximum(start, rows(self.forward_arrival, self.width - 2), out=start)
        rows(self.forward_arrival, 0)[...] = arrival
        rows(self.before_forward, 0)[...] = before
        start += self.forward[stages]
        rows(self.forward_end, 0)[...] = start
        before[...] = start

    def _backwards(
        self, first: int, last: int, number: int, step: int, before_first: tuple[int, ...]
    ) -> None:
        """Backwards of stages first, first + step, ... last: micro-batch `number` of the first, one more of
        each next.

        The receive of the first gradient of stage s is posted before the computation before that backward:
        before the forward of micro-batch `before_first[s]`.
        """
        count = (last - first) // step + 1
        begin, stride = (first + 1) * self.width + number + 2, step * self.width + 1
        if number == 0:
            self.before_backward[begin - 1] = self.before_forward[begin + before_first[first]]

        def rows(times: Floats, shift: int) -> Floats:
            start = begin + shift
            return times[start : start + (count - 1) * stride + 1 : stride]

        stages = slice(first, last + 1, step)
        before = self.clock[stages]
        arrival = np.maximum(rows(self.backward_end, self.width), rows(self.before_backward, -1))
        np.maximum(arrival, rows(self.backward_arrival, -1), out=arrival)
        arrival += self.gradient[stages]
        start = np.maximum(before, arrival)
        np.maximum(start, rows(self.backward_arrival, -self.width - 2), out=start)
        rows(self.backward_arrival, 0)[...] = arrival
        rows(self.before_backward, 0)[...] = before
        self.last_start[stages] = start
        start += self.backward[stages]
        rows(self.backward_end, 0)[...] = start
        before[...] = start
