"""How much of a step a pipeline may idle by its order, how uneven its stages may be, and where they may be.

In: seconds of stages, a schedule. Out: which plans keep the limits that the options set.

Terms. *Bubble*: share of a step in which the ranks that have a stage compute nothing, messages and reductions left out:
what the order of the actions and uneven stages leave idle. *Balance*: seconds of the fastest stage over those of the
slowest, forward and backward of one micro-batch on a replica. One stage has a bubble of 0 and a balance of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.plan import Plan
from rannc_backend.schedule.chain import chains_step_seconds
from rannc_backend.schedule.description import Lanes, Schedule
from rannc_backend.schedule.plan_simulation import PipelineShape, schedule_of, shape_of
from rannc_backend.settings.options import Config

Floats = NDArray[np.float64]
BUBBLE, BALANCE = "max_pipeline_bubble_ratio", "max_pipeline_unbalance_ratio"  # the options
_ROUNDED = 1e-9
_AS_PLANS_SAY = 1e-4  # beside numbers that plans round


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    """The largest bubble and the smallest balance of a plan; 0: no limit. `placement`: which of the two `Placement`s is
    wanted where both are there, "auto" for either.
    """

    bubble: float = 0.0
    balance: float = 0.0
    placement: Literal["auto", "replica_major", "stage_major"] = "auto"

    @classmethod
    def of(cls, config: Config) -> PipelineLimits:
        """As the options set them."""
        return cls(
            bubble=config.max_pipeline_bubble_ratio,
            balance=config.max_pipeline_unbalance_ratio,
            placement=config.placement,
        )

    def __bool__(self) -> bool:
        return self.bubble > 0 or self.balance > 0

    def most_stages(self, schedule: Schedule, num_micro_batches: int) -> float:
        """More stages are not allowed, however they are cut. Schedules that fill and drain leave p - 1 of m + p - 1
        micro-batches' time idle with p equal stages; of others nothing is known before they run.
        """
        if not self.bubble or not _fills_and_drains(schedule):
            return math.inf
        return math.floor(self.bubble / (1 - self.bubble) * num_micro_batches + 1 + _ROUNDED)

    def slowest_of(self, fastest_seconds: Floats) -> Floats:
        """Beside a stage that takes so long, no stage may take longer; inf without a limit."""
        if not self.balance:
            return np.full(np.shape(fastest_seconds), np.inf)
        return np.asarray(fastest_seconds / self.balance * (1 + _ROUNDED))

    def allow(
        self,
        schedule: Schedule,
        num_micro_batches: int,
        forward: Floats,
        backward: Floats,
        weight: Floats,
        replicas: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Whether each of n plans with one stage on each rank keeps the limits: [n].

        Args:
            forward, backward, weight, replicas: [n, stages]; finite seconds of one micro-batch, see `StageTerms`.
        """
        num_plans, num_stages = forward.shape
        compute = forward + backward
        allowed = compute.max(axis=1) <= self.slowest_of(compute.min(axis=1))
        allowed &= num_stages <= self.most_stages(schedule, num_micro_batches)
        if not self.bubble or num_stages == 1 or not allowed.any():
            return np.asarray(allowed, dtype=bool)
        forward, backward, weight, replicas = (
            column[allowed] for column in (forward, backward, weight, replicas)
        )
        nothing = np.zeros_like(forward)
        step = chains_step_seconds(
            forward,
            backward,
            nothing,
            nothing,
            nothing,
            nothing + 1,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            weight=weight,
        )
        busy = num_micro_batches * (replicas * (forward + backward)).sum(axis=1)
        allowed[allowed] = busy >= (1 - self.bubble) * replicas.sum(axis=1) * step * (1 - _ROUNDED)
        return np.asarray(allowed, dtype=bool)

    def broken_by(
        self,
        shape: PipelineShape,
        schedule: Schedule,
        lanes: Lanes,
        num_micro_batches: int,
        tolerance: float = _ROUNDED,
    ) -> str:
        """In words, which limit a plan does not keep; "" where it keeps both."""
        if self.balance and shape.balance < self.balance - tolerance:
            return (
                f"the fastest stage takes {shape.balance:.3f} of the slowest one's time, and {BALANCE} asks for "
                f"{self.balance:g} at least"
            )
        if not self.bubble or len(lanes) == 1:
            return ""
        if shape.bubble > self.bubble + tolerance:
            return (
                f"ranks idle for {shape.bubble:.3f} of the step by its order and uneven stages, and {BUBBLE} "
                f"allows {self.bubble:g}"
            )
        least = least_bubble(schedule, lanes, num_micro_batches)
        if least > self.bubble + _ROUNDED:
            return (
                f"{len(lanes)} equal stages idle for {least:.3f} of a step with {num_micro_batches} micro-batches "
                f"under schedule {schedule}, and {BUBBLE} allows {self.bubble:g}"
            )
        return ""

    def broken_by_plan(self, plan: Plan) -> str:
        """The same of a plan, whose numbers are rounded. Raises `PlanError`: see `shape_of`."""
        if not self:
            return ""
        number = plan.num_micro_batches
        return self.broken_by(shape_of(plan), schedule_of(plan), plan.lanes, number, _AS_PLANS_SAY)


def least_bubble(schedule: Schedule, lanes: Lanes, num_micro_batches: int) -> float:
    """The documented bubble, of equal stages one on each rank; 0 where nothing is documented of a schedule."""
    if not _fills_and_drains(schedule) or any(len(lane) > 1 for lane in lanes):
        return 0.0
    return (len(lanes) - 1) / (num_micro_batches + len(lanes) - 1)


def _fills_and_drains(schedule: Schedule) -> bool:
    return not (schedule.splits_backward or schedule.is_made_for_plans or schedule.stages_per_lane > 1)
