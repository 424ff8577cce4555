"""What is to be known of a schedule: one frozen object, which everything asks that depends on the schedule.

In: numbers of stages and micro-batches, seconds of stages. Out: orders, micro-batches in flight, bounds of
the step. A schedule is a module of this folder with an instance named `SCHEDULE`, and an entry in the list of
`settings/options.py`. It must give its order and what it keeps in flight; it may state more bounds than those
that hold for every order, and the levels in which its steps are priced quickly.

Terms. Seconds of a stage: forward f, backward b, c = f + b, messages into it t and u; a: stages after it; P:
the round trip, sum of f + b + t + u over all stages; m: micro-batches, p: stages. Where backwards have two parts, i and
w: P has i in the place of b for all stages but the first, of which each W follows its I. Numbers and arrays of them
are handled alike, elementwise, as the search asks for thousands of stages at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.action import Action, ActionKind, Program

Floats = NDArray[np.float64]
Count = TypeVar("Count", int, NDArray[np.int64])
Order = tuple[Program, ...]
Lanes = tuple[tuple[int, ...], ...]
"""By lane its stages, ascending."""
Weights = list[tuple[float, float]]


def one_stage_each(num_stages: int) -> Lanes:
    """Lanes of which lane s has stage s alone.

    Returns:
        As many as there are stages.
    """
    return tuple((stage,) for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class Level:
    """Computations that do not wait for each other: forwards (or backwards) of the stages first, first +
    step, ... last. The first has micro-batch `number`; from each to the next it is one less (one more for
    backwards).
    """

    is_forward: bool
    first: int
    last: int
    number: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSeconds:
    """Stages with so many before and after them, arrays of one shape: a forward, a backward, and `weight`: of the
    backward, the second part where it has two.
    """

    num_before: int | NDArray[np.int64]
    num_after: int | NDArray[np.int64]
    forward: Floats
    backward: Floats
    weight: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds(PlaceSeconds):
    """Besides both messages into them, and `reduction_tail`: how long after its gradients have reached the first stage the
    reductions of a stage end.
    """

    message: Floats
    gradient: Floats
    reduction_tail: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """`name`: as options and plans spell it. `eager_backward`: backwards run among the forwards, so within
    the call of the model, which needs a loss inside of it that is linear in its sums over rows; else a
    backward may wait for what the user does with the outputs. `splits_backward`: a backward has two parts, I and W
    (see `ActionKind`). `is_made_for_plans`: its order follows from the costs of a plan, so that it is made when the rest
    of a plan is known. `stages_per_lane`: how many stages the ranks of a lane compute. `saves_memory`: it is slower than
    others, and holds less, so it is of use where they compute values again.
    """

    name: str
    eager_backward: bool
    splits_backward: bool = False
    is_made_for_plans: bool = False
    stages_per_lane: int = 1
    saves_memory: bool = False

    def lanes(self, num_stages: int) -> Lanes:
        """The stages of each lane. `num_stages`: a multiple of `stages_per_lane`."""
        return one_stage_each(num_stages)

    def with_stages_per_lane(self, count: int) -> Schedule | None:
        """The same with so many stages on each lane; None where there is no such order."""
        return self if count == self.stages_per_lane else None

    @abstractmethod
    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        """Per lane its forwards and backwards, of whatever stages it owns, in sequence. Both numbers are at
        least 1.
        """

    @abstractmethod
    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        """Most micro-batches of which a stage keeps saved values at one time. `num_stages_to_end` counts the
        stage itself: no place may keep more than one that is further from the end.
        """

    def in_flight_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """`in_flight` of all stages, the first one first."""
        return tuple(self.in_flight(count, num_micro_batches) for count in range(num_stages, 0, -1))

    def kept(self, num_stages_to_end: Count, num_stages: Count, num_micro_batches: int) -> Count:
        """Most micro-batches of which a stage keeps what its W needs, at one time."""
        return 0 * num_stages_to_end

    def kept_bounds(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """`kept` of all stages, the first one first."""
        return tuple(self.kept(count, num_stages, num_micro_batches) for count in range(num_stages, 0, -1))

    def kept_memory(
        self,
        num_stages_to_end: Count,
        num_stages: Count,
        num_micro_batches: int,
        kept_bytes: Floats | float,
        flight_bytes: Floats | float,
    ) -> Floats:
        """Bytes of what lies beside the micro-batches in flight. One of those that are kept has just left them.

        Args:
            kept_bytes: of one micro-batch, what is kept between the two parts of its backward.
            flight_bytes: of one micro-batch in flight.
        """
        if not self.splits_backward:
            return np.zeros(np.shape(kept_bytes))
        count = self.kept(num_stages_to_end, num_stages, num_micro_batches)
        beside = np.maximum(np.subtract(kept_bytes, flight_bytes), 0.0)
        return np.asarray((count - 1) * np.asarray(kept_bytes) + beside)

    def levels(self, num_stages: int, num_micro_batches: int) -> Iterator[Level] | None:
        """The order as levels, for chains in which lane s runs stage s alone; micro-batches are numbered in
        the sequence in which they come. None: a step is priced by simulating its programs, one after the
        other.
        """
        return None

    def forwards_before(self, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
        """Per stage, the number of the forward that runs right before its first backward."""
        return (num_micro_batches - 1,) * num_stages

    # Bounds of the step. Where nothing is overridden they hold for every order.

    def weights(self, num_stages: int, num_micro_batches: int) -> Weights:
        """(alpha, beta) of the bounds alpha P + beta max c."""
        return []

    def quick_weights(self, num_stages: int, num_micro_batches: int) -> Weights:
        """`weights`, and what `excess` leaves of the longest c at worst."""
        return self.weights(num_stages, num_micro_batches)

    def excess(self, num_micro_batches: int, stage: PlaceSeconds) -> Floats:
        """What a stage adds to P at least; the largest of a plan counts."""
        return np.zeros_like(stage.forward)

    def longest(self, forward: Floats, backward: Floats) -> Floats:
        """The seconds of a stage of which the largest of a plan is `longest` in `bound_of_peaks`."""
        return forward + backward

    def bound_of_peaks(
        self,
        num_stages: int,
        num_micro_batches: int,
        path: Floats,
        excess: Floats,
        longest: Floats,
        highest: float,
    ) -> Floats:
        """A bound from P and from the largest `excess` and `longest`. `highest`: no plan's largest c is less
        (without `weights`: no plan's largest excess).
        """
        return self._weighted(num_stages, num_micro_batches, path, path + excess, longest, highest)

    def bound_of_stages(
        self, num_micro_batches: int, forward: Floats, backward: Floats, weight: Floats
    ) -> Floats:
        """[n] of n plans from seconds [stages, n], without messages and reductions; of two micro-batches or
        more. `weight`: of the backwards, what is no part of P.
        """
        num_stages, compute = len(forward), forward + backward
        before = np.arange(num_stages)[:, None]
        places = PlaceSeconds(
            num_before=before,
            num_after=num_stages - 1 - before,
            forward=forward,
            backward=backward,
            weight=np.where(before > 0, weight, 0.0),
        )
        with np.errstate(invalid="ignore"):
            path = (compute - places.weight).sum(axis=0)
            excess = self.excess(num_micro_batches, places).max(axis=0)
            result = np.maximum(path, path + excess)
            for alpha, beta in self.weights(num_stages, num_micro_batches):
                result = np.maximum(result, alpha * path + beta * compute.max(axis=0))
        return np.maximum(result, num_micro_batches * compute.max(axis=0))

    def exact_peaks(
        self, num_micro_batches: int, path: Floats, stage: StageSeconds
    ) -> tuple[Floats, Floats, Floats]:
        """`excess` and `longest` where messages and reductions are known, and the bound that a stage sets
        alone. `path`: P of the stages before it and its messages.
        """
        compute = stage.forward + stage.backward
        excess = stage.reduction_tail + self.excess(num_micro_batches, stage)
        if self.splits_backward:
            return excess, compute, num_micro_batches * compute
        return excess, compute, path + num_micro_batches * compute + stage.reduction_tail

    def _weighted(
        self,
        num_stages: int,
        num_micro_batches: int,
        path: Floats,
        result: Floats,
        longest: Floats,
        highest: float,
    ) -> Floats:
        weights = self.weights(num_stages, num_micro_batches)
        if not weights:
            return np.maximum(result, path + highest)
        longest = np.maximum(longest, highest)
        for alpha, beta in weights:
            if beta:
                result = np.maximum(result, alpha * path + beta * longest)
            else:
                result = np.maximum(result, alpha * path)
        return result

    def __str__(self) -> str:
        return self.name


def with_split_backwards(lane: Program, delay: int) -> Program:
    """The lane with its backwards in two parts, each W so many micro-batches behind its I."""
    parts: list[Action] = []
    waiting: deque[Action] = deque()
    for action in lane:
        if action.kind is not ActionKind.BACKWARD:
            parts.append(action)
            continue
        parts.append(inputs_of(action.stage, action.micro_batch))
        waiting.append(weights_of(action.stage, action.micro_batch))
        if len(waiting) > delay:
            parts.append(waiting.popleft())
    return (*parts, *waiting)


def forward_of(stage: int, micro_batch: int) -> Action:
    """`2F0`."""
    return Action(stage, ActionKind.FORWARD, micro_batch)


def backward_of(stage: int, micro_batch: int) -> Action:
    """`2B0`."""
    return Action(stage, ActionKind.BACKWARD, micro_batch)


def inputs_of(stage: int, micro_batch: int) -> Action:
    """`2I0`."""
    return Action(stage, ActionKind.BACKWARD_INPUT, micro_batch)


def weights_of(stage: int, micro_batch: int) -> Action:
    """`2W0`."""
    return Action(stage, ActionKind.BACKWARD_WEIGHT, micro_batch)
