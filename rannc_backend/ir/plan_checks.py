"""Whether a plan fits a run, and its stages in words.

In: a plan; a run's ranks, parameters and memory. Out: nothing, or an error that names the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan


def check_against(
    plan: Plan,
    *,
    fingerprint: str,
    world_size: int,
    parameters: Iterable[str] | None = None,
    device_memory_bytes: int | None = None,
) -> None:
    """Check that a loaded plan fits this run; raises `PlanError` naming the difference.

    `parameters`: primary dotted names the graph reads (a plan must place each of them, and no other).
    `device_memory_bytes`: memory of this run's devices, None or 0 where it is not known.
    """
    if plan.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks and this run has {world_size}",
            cure=f"start {plan.world_size} processes or plan again for {world_size}.",
        )
    if plan.fingerprint != fingerprint:
        raise PlanError(
            f"the plan is for another graph: its fingerprint is {plan.fingerprint[:16]}..., the model's is "
            f"{fingerprint[:16]}...",
            cure="plan again: the model, its configuration, train/eval mode or input shapes differ from "
            "those that were planned.",
        )
    if parameters is not None:
        placed = {name for stage in plan.stages for name in stage.parameters}
        wanted = set(parameters)
        if unknown := sorted(placed - wanted):
            raise PlanError(
                f"the plan places parameter {unknown[0]!r}, which the model does not use ({len(unknown)} "
                "such names)"
            )
        if missing := sorted(wanted - placed):
            raise PlanError(
                f"the plan places parameter {missing[0]!r} on no stage ({len(missing)} such names)"
            )
    if device_memory_bytes:
        worst = max(plan.lanes, key=lambda lane: plan.lane_peak_bytes(lane[0]))
        needed = plan.lane_peak_bytes(worst[0])
        if needed > device_memory_bytes:
            raise PlanError(
                f"{lane_text(worst)} of the plan {'needs' if len(worst) == 1 else 'need'} {needed} bytes and a "
                f"device of this run has {device_memory_bytes}",
                cure="plan again for these devices.",
            )


def lane_text(stages: Sequence[int]) -> str:
    """Stages of the same ranks in words.

    Returns:
        "stage 2", or "stages 2 and 6".
    """
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
