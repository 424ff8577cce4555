"""That the parts of a plan agree with each other.

In: a plan whose fields each have the right type. Out: nothing, or a `ValueError` that names the place and the contradiction
(pydantic makes it a finding, `Plan.from_json` a `PlanError`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rannc_backend.ir.plan_text import first_repeated

if TYPE_CHECKING:
    from rannc_backend.ir.plan import BlockPlan, Plan, StagePlan


def check_parts_agree(plan: Plan) -> None:
    """Blocks, stages, ranks and costs; raises `ValueError`."""
    _check_indexes(plan.blocks, "blocks")
    _check_indexes(plan.stages, "stages")
    _check_blocks(plan)
    _check_stages(plan)
    _check_ranks(plan)
    _check_costs(plan)


def _check_indexes(items: tuple[BlockPlan, ...] | tuple[StagePlan, ...], what: str) -> None:
    for position, item in enumerate(items):
        if item.index != position:
            raise ValueError(f"{what}[{position}].index is {item.index}; indexes must count 0, 1, 2, ... in order")


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
            ("parameter", set(stage.parameters), {name for index in stage.blocks for name in plan.blocks[index].parameters}),
        ):
            if extra := sorted(listed - of_blocks):
                raise ValueError(f"{where} lists {what} {extra[0]!r}, which none of its blocks {list(stage.blocks)} has")
            if absent := sorted(of_blocks - listed):
                raise ValueError(f"{where} lacks {what} {absent[0]!r}, which its blocks {list(stage.blocks)} have")


def _check_ranks(plan: Plan) -> None:
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    repeated = first_repeated(ranks)
    if repeated is not None:
        raise ValueError(f"rank {repeated} is in two stages (or twice in one)")
    if outside := sorted(rank for rank in ranks if rank >= plan.world_size):
        raise ValueError(f"rank {outside[0]} is in a stage, but the plan is for ranks 0 to {plan.world_size - 1}")


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
            raise ValueError(f"{where}.predicted.peak_bytes is {cost.peak_bytes}, and its parts sum up to {sum(parts)}")
        rows = [entry.rows for entry in stage.at_rows]
        if any(later <= earlier for earlier, later in zip(rows, rows[1:], strict=False)):
            raise ValueError(f"{where}.at_rows must be ascending in rows, each number once, and has {rows[:8]}")
