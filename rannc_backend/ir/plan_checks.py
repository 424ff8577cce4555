"""Whether the parts of a plan agree with each other, and whether a plan fits a run.

In: a plan; a run's ranks, parameters and memory. Out: nothing, or an error that names the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan_text import first_repeated

if TYPE_CHECKING:
    from rannc_backend.ir.plan import BlockPlan, Plan, StagePlan


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


def check_parts_agree(plan: Plan) -> None:
    """Blocks, stages, ranks and costs; raises `ValueError`."""
    _check_indexes(plan.blocks, "blocks")
    _check_indexes(plan.stages, "stages")
    _check_blocks(plan)
    _check_stages(plan)
    _check_ranks(plan)
    _check_costs(plan)
    for output in plan.outputs:
        if output.stage >= plan.num_stages:
            raise ValueError(f"output {output.name!r} is made in stage {output.stage}, which is not there")


def _check_indexes(items: tuple[BlockPlan | StagePlan, ...], what: str) -> None:
    for position, item in enumerate(items):
        if item.index != position:
            raise ValueError(
                f"{what}[{position}].index is {item.index}; indexes must count 0, 1, 2, ... in order"
            )


def _check_blocks(plan: Plan) -> None:
    repeated = first_repeated(name for block in plan.blocks for name in block.nodes)
    if repeated is not None:
        raise ValueError(f"node {repeated!r} is in two blocks (or twice in one)")
    listed = [index for stage in plan.stages for index in stage.blocks]
    repeated = first_repeated(listed)
    if repeated is not None:
        raise ValueError(f"block {repeated} is in two stages (or twice in one)")
    if unknown := sorted(set(listed) - set(range(len(plan.blocks)))):
        raise ValueError(f"block {unknown[0]} is in a stage, but there are only {len(plan.blocks)} blocks")
    if missing := sorted(set(range(len(plan.blocks))) - set(listed)):
        raise ValueError(f"block {missing[0]} is in no stage")


def _check_stages(plan: Plan) -> None:
    repeated = first_repeated(name for stage in plan.stages for name in stage.nodes)
    if repeated is not None:
        raise ValueError(f"node {repeated!r} is in two stages (or twice in one)")
    for stage in plan.stages:
        where = f"stages[{stage.index}]"
        for what, listed, of_blocks in (
            ("node", set(stage.nodes), {name for index in stage.blocks for name in plan.blocks[index].nodes}),
            (
                "parameter",
                set(stage.parameters),
                {name for index in stage.blocks for name in plan.blocks[index].parameters},
            ),
        ):
            if extra := sorted(listed - of_blocks):
                raise ValueError(
                    f"{where} lists {what} {extra[0]!r}, which none of its blocks {list(stage.blocks)} has"
                )
            if absent := sorted(of_blocks - listed):
                raise ValueError(
                    f"{where} lacks {what} {absent[0]!r}, which its blocks {list(stage.blocks)} have"
                )


def _check_ranks(plan: Plan) -> None:
    ranks = [rank for lane in plan.lanes for rank in plan.stages[lane[0]].ranks]
    repeated = first_repeated(ranks)
    if repeated is not None:
        raise ValueError(
            f"rank {repeated} is twice in a stage, or in two that do not have the same ranks: ranks compute all "
            "of several stages, or one"
        )
    if outside := sorted(rank for rank in ranks if rank >= plan.world_size):
        raise ValueError(
            f"rank {outside[0]} is in a stage, but the plan is for ranks 0 to {plan.world_size - 1}"
        )


def _check_costs(plan: Plan) -> None:
    for stage in plan.stages:
        cost, where = stage.predicted, f"stages[{stage.index}]"
        parts = (
            cost.parameter_bytes,
            cost.gradient_bytes,
            cost.optimizer_bytes,
            cost.activation_bytes,
            cost.buffer_bytes,
            cost.workspace_bytes,
        )
        if cost.peak_bytes != sum(parts):
            raise ValueError(
                f"{where}.predicted.peak_bytes is {cost.peak_bytes}, and its parts sum up to {sum(parts)}"
            )
        rows = [entry.rows for entry in stage.at_rows]
        if any(later <= earlier for earlier, later in zip(rows, rows[1:], strict=False)):
            raise ValueError(
                f"{where}.at_rows must be ascending in rows, each number once, and has {rows[:8]}"
            )
