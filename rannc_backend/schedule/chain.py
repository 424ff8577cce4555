"""How long a step of a chain of stages takes: the objective of the planner, for one plan or for many at once.

In: seconds of each stage's forward and backward, of the messages between neighbours, and of the all-reduce. Out: seconds of
a step. Terms: a *chain* is a pipeline in which stage s takes part in two channels with stage s - 1 only: values in, their
gradients back; every micro-batch sends one message over each. A *level* is the time at which a computation would run if all
took equally long; computations of one level do not wait for each other, so they are priced by one numpy operation.

These are the recurrences of `progress.run_to_end` on the programs that `lowering.lower` makes (window 1) of such a chain,
and the reductions of `simulator`. Of a stage at one micro-batch: a message starts when it was sent, the receive was posted
(before the computation that uses the message before it) and the message before it arrived; a computation starts when the one
before it on the stage has ended, its message is there, and the message that the stage sent two before has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .orders import ScheduleName

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """Seconds of one stage. The two messages are those between this stage and the one before it; 0 for the first.

    `backward_seconds` include what is computed again. `allreduce_seconds` is of all gradients, once per step, in `num_buckets`
    equal parts that run under the last backward.
    """

    forward_seconds: float
    backward_seconds: float = 0.0
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    num_buckets: int = 1


def chain_step_seconds(stages: Sequence[ChainStage], num_micro_batches: int, schedule: ScheduleName) -> float:
    """Seconds of one step, as `simulator.simulate` of the lowered programs gives them."""
    columns = (
        "forward_seconds", "backward_seconds", "message_seconds", "gradient_seconds", "allreduce_seconds", "num_buckets"
    )  # fmt: skip
    values = [np.array([[float(getattr(stage, name)) for stage in stages]]) for name in columns]
    return float(chains_step_seconds(*values, num_micro_batches=num_micro_batches, schedule=schedule)[0])


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
    """`chain_step_seconds` of many chains of equally many stages: all arguments are [chains, stages], the result [chains].

    Columns mean what the fields of `ChainStage` mean. Memory: 40 bytes x chains x (stages + 2) x (micro-batches + 2).
    """
    assert forward.ndim == 2 and forward.shape[1] >= 1 and num_micro_batches >= 1, f"no chains: {forward.shape}"
    run = _Run.of(forward, backward, message, gradient, num_micro_batches)
    if schedule == "1f1b":
        run.one_f_one_b()
    else:
        run.fill_drain()
    ends = run.clock.T
    first_bucket = run.last_start.T + backward / num_buckets
    reduced = np.maximum(first_bucket + allreduce, ends + allreduce / num_buckets)
    return np.maximum(ends, reduced).max(axis=1)


def reduction_seconds(backward: Floats, allreduce: Floats, num_buckets: Floats) -> Floats:
    """How long after the end of a stage's last backward its reductions end (0 or more)."""
    return np.maximum(allreduce - backward + backward / num_buckets, allreduce / num_buckets)


@dataclass(slots=True, eq=False)
class _Run:
    """Times of all chains. Stage s at micro-batch m has row (s + 1) * width + m + 2 of the arrays of times [rows, chains].

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
    def of(cls, forward: Floats, backward: Floats, message: Floats, gradient: Floats, num_micro_batches: int) -> _Run:
        into = np.concatenate([gradient[:, 1:], np.zeros((len(gradient), 1))], axis=1)
        columns = [np.ascontiguousarray(values.T) for values in (forward, backward, message, into)]
        return cls(forward.shape[1], num_micro_batches, *columns, num_micro_batches + 2)

    def __post_init__(self) -> None:
        num_chains = self.forward.shape[1]
        self.clock = np.zeros((self.num_stages, num_chains))
        self.last_start = np.zeros((self.num_stages, num_chains))
        rows = ((self.num_stages + 2) * self.width, num_chains)
        for name in (
            "forward_end", "forward_arrival", "before_forward", "backward_end", "backward_arrival", "before_backward"
        ):  # fmt: skip
            setattr(self, name, np.zeros(rows))

    def fill_drain(self) -> None:
        stages, number = self.num_stages, self.num_micro_batches
        for level in range(stages + number - 1):
            self._forwards(max(0, level - number + 1), min(level, stages - 1), level, 1)
        for level in range(stages + number - 1):
            # Stage s runs micro-batch level - (stages - 1 - s).
            first, last = max(0, stages - 1 - level), min(stages - 1, stages - 2 - level + number)
            self._backwards(first, last, level - (stages - 1 - first), 1, (number - 1,) * stages)

    def one_f_one_b(self) -> None:
        """Stage s runs ahead = stages - 1 - s forwards first. Levels: forward m at s + m while m < ahead, then at s + 2 m;
        backward m at 2 stages - 1 - s + 2 m."""
        stages, number = self.num_stages, self.num_micro_batches
        before_first = tuple(min(stages - 1 - stage, number - 1) for stage in range(stages))
        for level in range(2 * stages + 2 * number):
            if level < stages - 1:
                # m = level - s < stages - 1 - s always holds here; m < number.
                self._forwards(max(0, level - number + 1), level, level, 1)
            # 2 m = level - s >= 2 ahead: s >= 2 stages - 2 - level.
            first, last = max(0, 2 * stages - 2 - level, level - 2 * number + 2), min(stages - 1, level)
            first += (level - first) % 2
            self._forwards(first, last, level, 2)
            # 2 m = level + s + 1 - 2 stages
            first = max(0, 2 * stages - 1 - level)
            last = min(stages - 1, 2 * number - 3 - level + 2 * stages)
            first += (level + first + 1) % 2
            self._backwards(first, last, (level + first + 1 - 2 * stages) // 2, 2, before_first)

    def _forwards(self, first: int, last: int, level: int, step: int) -> None:
        """Forwards of stages first, first + step, ... last: micro-batch (level - s) / step of stage s."""
        if last < first:
            return
        number = (level - first) // step
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

    def _backwards(self, first: int, last: int, number: int, step: int, before_first: tuple[int, ...]) -> None:
        """Backwards of stages first, first + step, ... last: micro-batch `number` of the first, one more of each next.

        The receive of the first gradient of stage s is posted before the computation before that backward: before the
        forward of micro-batch `before_first[s]`.
        """
        if last < first:
            return
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
