"""What no order of a plan's stages can beat, beside the plan's step.

In: a `Plan`. Out: seconds, and words. The bound is that of the stages as they are: other cuts, ranks or numbers of
micro-batches have others. It holds for the model of the step in which stages wait for their neighbours; values that skip
stages can only make steps longer.
"""

from __future__ import annotations

from rannc_backend.ir.plan import Plan
from rannc_backend.report.words import percent_text
from rannc_backend.schedule.list_run import lower_bound_seconds
from rannc_backend.schedule.plan_simulation import lane_costs, stage_cost

_EQUAL = 5e-4  # relative: what is printed as no difference


def order_bound_seconds(plan: Plan) -> float:
    """Below which no order's step can fall, of these stages on these ranks with as many micro-batches."""
    costs = [lane_costs(plan, stage) for stage in plan.stages]
    reductions = []
    for stage in plan.stages:
        seconds = stage_cost(plan, stage, plan.num_micro_batches).seconds
        # Reductions run under the last computation; the longest that it can be is a whole backward.
        bucket = seconds.backward / seconds.num_buckets
        reductions.append(
            max(seconds.allreduce - seconds.backward + bucket, seconds.allreduce / seconds.num_buckets)
        )
    work = plan.num_micro_batches * sum(
        count * (cost.forward + cost.inputs + cost.weights)
        for count, cost in zip(plan.stage_replicas, costs, strict=True)
    )
    num_cores = plan.cluster.num_devices * plan.cluster.core_share
    computed = max(
        lower_bound_seconds(costs, plan.num_micro_batches, plan.lanes, reductions), work / num_cores
    )
    return computed + max(stage.predicted.new_values_seconds for stage in plan.stages)


def order_bound_text(plan: Plan, bound_seconds: float) -> str:
    """How much longer the plan's own order takes."""
    longer = plan.predicted_step_seconds / bound_seconds - 1
    return f"this one takes {percent_text(longer)} longer" if longer >= _EQUAL else "this one takes as long"
