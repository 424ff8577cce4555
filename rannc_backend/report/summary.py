"""What `rannc show` shows, as JSON for programs.

In: a `Plan`. Out: a dict of plain values: seconds, bytes and shares as numbers, modules in short names.
Smaller than the plan itself, without nodes and blocks.
"""

from __future__ import annotations

from typing import Any

from rannc_backend.ir.plan import Plan
from rannc_backend.report.modules import module_tree, stage_modules
from rannc_backend.report.order_bound import order_bound_seconds

_OF_PLAN = (
    "model_name", "plan_name", "fingerprint", "world_size", "batch_rows", "num_micro_batches", "schedule", "memory_limit_bytes",
    "predicted_step_seconds", "equal_split_seconds", "proven_gap", "proven_for", "costs_from", "binding",
)  # fmt: skip


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The plan without what only a run needs; keys are those of the plan's own JSON, and `order_bound_seconds`."""
    root = module_tree(plan)
    return {
        **{name: getattr(plan, name) for name in _OF_PLAN},
        "order_bound_seconds": order_bound_seconds(plan),
        "num_stages": plan.num_stages,
        "stage_replicas": list(plan.stage_replicas),
        "stages": [
            {
                "index": stage.index,
                "ranks": list(stage.ranks),
                "blocks": list(stage.blocks),
                "modules": stage_modules(root, stage.index),
                "recompute": stage.recompute,
                "predicted": stage.predicted.model_dump(mode="json"),
            }
            for stage in plan.stages
        ],
        "outputs": [output.model_dump(mode="json") for output in plan.outputs],
        "outputs_left_out": plan.outputs_left_out,
        "alternatives": [other.model_dump(mode="json", exclude={"plan"}) for other in plan.alternatives],
        "what_if": [item.model_dump(mode="json") for item in plan.what_if],
        "cluster": plan.cluster.model_dump(mode="json"),
    }
