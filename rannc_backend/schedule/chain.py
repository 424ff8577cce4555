"""How long a step of a chain of stages takes: the objective of the planner, for one plan or for many at once.

In: seconds of each stage's forward and backward, of the messages between neighbours, and of the all-reduce.
Out: seconds of a step. Terms: a *chain* is a pipeline in which stage s takes part in two channels with stage
s - 1 only: values in, their gradients back; every micro-batch sends one message over each. A *level* is the
time at which a computation would run if all took equally long; computations of one level do not wait for each
other, so they are priced by one numpy operation.

A schedule that does not say its levels is simulated, chain by chain.

These are the recurrences of `progress.run_to_end` on the programs that `lowering.lower` makes (window 1) of
such a chain, and the reductions of `simulator`. Of a stage at one micro-batch: a message starts when it was
sent, the receive was posted (before the computation that uses the message before it) and the message before
it arrived; a computation starts when the one before it on the stage has ended, its message is there, and the
message that the stage sent two before has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, Channel
from rannc_backend.schedule.description import Level, Schedule
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import ScheduleName, schedule_named
from rannc_backend.schedule.simulator import StageSeconds, simulate

Floats = NDArray[np.float64]


def chains_step_seconds(
    forward: Floats,
    backward: Floats,
    message: Floats,
    gradient: Floats,
    allreduce: Floats,
    num_buckets: Floats,
    *,
    num_micro_batches: int,
    schedule: ScheduleName,
) -> Floats:
    """Seconds of one step of many chains of equally many stages, as `simulator.simulate` of the lowered
    programs gives them: all arguments are [chains, stages], the result [chains].

    Columns are seconds. The two messages are those between a stage and the one before it; 0 for the first.
    `backward` includes what is computed again. `allreduce` is of all gradients, once per step, in
    `num_buckets` equal parts that run under the last backward. Memory: 40 bytes x chains x (stages + 2) x
    (micro-batches + 2).
    """
    assert forward.ndim == 2 and forward.shape[1] >= 1 and num_micro_batches >= 1, (
        f"no chains: {forward.shape}"
    )
    described = schedule_named(schedule)
    levels = described.levels(forward.shape[1], num_micro_batches)
    if levels is None:
        columns = (forward, backward, message, gradient, allreduce, num_buckets)
        return np.array(
            [_simulated_seconds(chain, num_micro_batches, described) for chain in np.stack(columns, axis=-1)]
        )
    run = _Run.of(forward, backward, message, gradient, num_micro_batches)
    run.follow(levels, described.forwards_before(forward.shape[1], num_micro_batches))
    ends = run.clock.T
    first_bucket = run.last_start.T + backward / num_buckets
    reduced = np.maximum(first_bucket + allreduce, ends + allreduce / num_buckets)
    return np.maximum(ends, reduced).max(axis=1)


def _simulated_seconds(stages: Floats, num_micro_batches: int, schedule: Schedule) -> float:
    """Of one chain: `stages` [stages, columns]."""
    edges, messages, costs = [], {}, []
    for index, (forward, backward, message, gradient, allreduce, num_buckets) in enumerate(stages.tolist()):
        if index:
            edges.append(EdgeSpec(src=index - 1, dst=index, num_forward_values=1, num_gradient_values=1))
            messages[Channel(index - 1, index, FORWARD_VALUES)] = message
            messages[Channel(index, index - 1, GRADIENTS)] = gradient
        costs.append(
            StageSeconds(
                forward=forward, backward=backward, allreduce=allreduce, num_buckets=int(num_buckets)
            )
        )
    order = schedule.order(len(stages), num_micro_batches)
    return simulate(lower(order, edges, "train", num_micro_batches), costs, messages).makespan_seconds


def reduction_seconds(backward: Floats, allreduce: Floats, num_buckets: Floats) -> Floats:
    """How long after the end of a stage's last backward its reductions end (0 or more)."""
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
