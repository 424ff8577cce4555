"""A plan as text for a terminal or a pipe, 80 columns or more.

In: a `Plan`. Out: rich renderables, one per section: what was decided, where each stage lies, its seconds,
its memory, what lost, what would help. Every text of the plan is made printable and taken literally, never as
rich's markup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rannc_backend.ir.plan import Alternative, Plan, StagePlan
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.report.modules import module_tree, stage_modules
from rannc_backend.report.order_bound import order_bound_seconds, order_bound_text
from rannc_backend.report.words import (
    change_text,
    count_text,
    formats_text,
    kept_text,
    limit_text,
    name_text,
    offload_text,
    percent_text,
    printable,
    ranges_text,
    row_gradients_text,
    seconds_text,
    size_text,
    stages_text,
    told_text,
    zero_text,
)

_BAR_CELLS = 12
_MAX_OUTPUTS = 3  # that are named
_PARTS = " ▏▎▍▌▋▊▉█"


def stdout_console(piped_columns: int = 100, **options: Any) -> Console:
    """A console for stdout; so many columns wide where that is no terminal: rich's 80 fold tables into
    strips.
    """
    return Console(width=None if sys.stdout.isatty() else piped_columns, **options)


def plan_report(plan: Plan) -> Iterator[RenderableType]:
    """The sections of `rannc show`, with an empty line before each but the first."""
    sections: list[RenderableType] = [
        headline(plan),
        placement_table(plan),
        seconds_table(plan),
        memory_table(plan),
    ]
    sections += [alternatives_table(plan)] if plan.alternatives else []
    sections += [what_if_table(plan)] if plan.what_if else []
    for index, section in enumerate(sections):
        if index:
            yield Text()
        yield section


def headline(plan: Plan) -> RenderableType:
    """What was decided, what it should take, and what binds it."""
    lines: list[RenderableType] = [
        Text.assemble((name_text(plan), "bold"), f": {shape_text(plan)}"),
        _fact(
            "step",
            Text.assemble(
                (seconds_text(plan.predicted_step_seconds), "bold"), f" predicted; {proof_text(plan)}"
            ),
        ),
    ]
    if bound := order_bound_seconds(plan):
        told = (
            f"no order of these stages takes less than {seconds_text(bound)}; {order_bound_text(plan, bound)}"
        )
        lines.append(_fact("lower bound", Text(told)))
    if plan.equal_split_seconds is not None:
        lines.append(_fact("equal split", Text(equal_split_text(plan))))
    lines += [
        _fact("bound by", Text(printable(plan.binding))),
        _fact("memory", Text(memory_text(plan))),
        *([_fact("ZeRO", Text(divided_text(plan)))] if plan.zero_stage else []),
        *([_fact("outputs", Text(outputs_text(plan)))] if plan.outputs else []),
        _fact("cluster", Text(cluster_text(plan))),
    ]
    return Group(*lines)


def shape_text(plan: Plan) -> str:
    """Stages, ranks, micro-batches and schedule in one line."""
    used = plan.num_working_ranks
    idle = f" ({plan.world_size - used} of them idle)" if used < plan.world_size else ""
    return (
        f"{count_text(plan.num_stages, 'stage')} on {count_text(plan.world_size, 'rank')}{idle}, "
        f"{count_text(plan.num_micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{count_text(plan.batch_rows, 'row')} in all, schedule {plan.schedule}, stages {plan.stage_compiler}"
        f"{', ' + zero_text(plan.zero_stage, plan.zero_ngroups) if plan.zero_stage else ''}"
        f"{', ' + told_text(plan.told_recompute) if plan.told_recompute else ''}"
        f"{', offload ' + offload_text(plan) if plan.offload != 'none' else ''}"
        f"{'' if plan.formats.are_exact else ', ' + formats_text(plan)}"
        f"{', ' + row_gradients_text(plan) if plan.formats.num_row_gradients else ''}"
    )


def proof_text(plan: Plan) -> str:
    """How sure the planner is, and where its costs come from."""
    if len(plan.lanes) < plan.num_stages:
        return f"not proven, as ranks have several stages, for {printable(plan.costs_from)} costs"
    proven = (
        "proven the best"
        if plan.proven_gap == 0
        else f"at most {percent_text(plan.proven_gap)} from the best"
    )
    *others, last = plan.proven_for or ("",)
    schedules = f" with {', '.join(others)} or {last}," if others else f" with {last}," if last else ""
    return f"{proven}{schedules} for {printable(plan.costs_from)} costs"


def equal_split_text(plan: Plan) -> str:
    """The best plan with equal stages beside this one."""
    seconds = plan.equal_split_seconds or 0.0
    if plan.predicted_step_seconds <= 0:
        return seconds_text(seconds)
    return f"{seconds_text(seconds)}; this plan is {seconds / plan.predicted_step_seconds:.2f} x as fast"


def memory_text(plan: Plan) -> str:
    """The fullest rank beside the limit."""
    worst = next(lane for lane in plan.lanes if plan.lane_peak_bytes(lane[0]) == plan.peak_bytes)
    limit = plan.memory_limit_bytes
    share = f" ({percent_text(plan.peak_bytes / limit)})" if limit else ""
    return f"at most {size_text(plan.peak_bytes)}, on {lane_text(worst)}, of {limit_text(limit)} per device{share}"


def divided_text(plan: Plan) -> str:
    """What it frees, and what it costs, that one replica updates a parameter."""
    costs = [stage.predicted for stage in plan.stages]
    freed = max(sum(costs[index].elsewhere_bytes for index in lane) for lane in plan.lanes)
    if not freed:
        return "nothing is divided: no stage has replicas, or the plan does not say what is"
    seconds = max(cost.new_values_seconds for cost in costs)
    return (
        f"level {plan.zero_stage} frees up to {size_text(freed)} on a rank, and new values take "
        f"{seconds_text(seconds)} of the step"
    )


def outputs_text(plan: Plan) -> str:
    """What comes back beside scalars, its bytes of all rows of a step, or why it does not; the largest first."""
    named = [
        f"{printable(output.name)}{f' of {printable(output.module)}' if output.module else ''} "
        f"({size_text(output.num_bytes)}, stage {output.stage})"
        for output in sorted(plan.outputs, key=lambda output: -output.num_bytes)[:_MAX_OUTPUTS]
    ]
    more = len(plan.outputs) - len(named)
    whole = f"{', '.join(named)}{f' and {more} more' if more else ''}"
    total = size_text(sum(output.num_bytes for output in plan.outputs))
    if not plan.outputs_left_out:
        return f"{whole}: every rank gets its rows, {total} per step in all"
    return f"not delivered: {whole}; {printable(plan.outputs_left_out)}; outputs=all plans room for them"


def cluster_text(plan: Plan) -> str:
    """Name, devices and nodes."""
    cluster = plan.cluster
    nodes = -(-cluster.num_devices // cluster.devices_per_node)
    device = printable(cluster.device_name)
    return f"{printable(cluster.name)}: {cluster.num_devices} x {device} on {count_text(nodes, 'node')}"


def placement_table(plan: Plan) -> Table:
    """Stage, ranks, blocks and modules."""
    table = _table("Stages")
    for name in ("stage", "ranks", "replicas", "blocks"):
        table.add_column(name, justify="right", no_wrap=name == "stage")
    table.add_column("modules", ratio=1, overflow="fold")
    root = module_tree(plan)
    for stage in plan.stages:
        table.add_row(
            _stage_cell(stage),
            ranges_text(stage.ranks),
            str(stage.num_replicas),
            ranges_text(stage.blocks),
            Text(", ".join(stage_modules(root, stage.index))),
        )
    return table


def seconds_table(plan: Plan) -> Table:
    """Forward, backward and messages of one micro-batch, the all-reduce of a step, idle time; what is kept
    for backward.
    """
    table = _table("Seconds (of one micro-batch; all-reduce and idle: of the step)")
    for name in ("stage", "forward", "backward", "transfer", "all-reduce", "kept", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage in plan.stages:
        cost = stage.predicted
        table.add_row(
            _stage_cell(stage),
            seconds_text(cost.forward_seconds),
            seconds_text(cost.backward_seconds),
            seconds_text(cost.transfer_seconds),
            seconds_text(cost.allreduce_seconds),
            kept_text((stage.recompute,), plan.told_recompute),
            percent_text(cost.idle_share),
            Text(bar(cost.idle_share), style="yellow"),
        )
    return table


def memory_table(plan: Plan) -> Table:
    """The parts of each stage's peak, and the limit it stays under."""
    limit = plan.memory_limit_bytes
    table = _table(f"Memory of one rank (limit {limit_text(limit)})", gap=0)
    for name in (
        "stage",
        "weights",
        "grads",
        "optimizer",
        "activations",
        "buffers",
        "workspace",
        "peak",
        "of limit",
    ):
        table.add_column(name, justify="right")
    for stage in plan.stages:
        cost = stage.predicted
        parts = (
            cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes, cost.activation_bytes, cost.buffer_bytes,
            cost.workspace_bytes, cost.peak_bytes,
        )  # fmt: skip
        share = plan.lane_peak_bytes(stage.index) / limit if limit else 0.0  # with all stages of its ranks
        style = "red" if limit and share > 1 else "default"
        table.add_row(
            _stage_cell(stage),
            *(size_text(part) for part in parts),
            Text(percent_text(share) if limit else "", style=style),
        )
    return table


def alternatives_table(plan: Plan) -> Table:
    """The best plans that were not taken, fastest first, and why."""
    table = _table("Alternatives that lost")
    table.add_column("plan", ratio=4, overflow="fold")
    columns = ("step", "slower", "measured") if plan.measured_step_seconds is not None else ("step", "slower")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", ratio=5, overflow="fold")
    for other in sorted_alternatives(plan):
        seconds = other.predicted_step_seconds
        table.add_row(
            alternative_text(other),
            "-" if seconds is None else seconds_text(seconds),
            "no room" if seconds is None else change_text(plan.predicted_step_seconds, seconds),
            *[_measured_text(other.measured_step_seconds)] * (len(columns) - 2),
            Text(printable(other.reason)),
        )
    if plan.measured_step_seconds is not None:
        table.caption = f"this plan's step was measured: {seconds_text(plan.measured_step_seconds)}"
    return table


def _measured_text(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def alternative_text(other: Alternative) -> str:
    """The shape of a plan that was not taken."""
    micro_batches = count_text(other.num_micro_batches, "micro-batch", "micro-batches")
    kept = kept_text(other.recompute)
    recompute = "" if kept == "all" else f", {kept} kept"
    return f"{stages_text(other.stage_replicas)}, {micro_batches}, {other.schedule}{recompute}"


def sorted_alternatives(plan: Plan) -> list[Alternative]:
    """Fastest first, those without room last."""
    return sorted(
        plan.alternatives,
        key=lambda other: (
            other.predicted_step_seconds is None,
            other.predicted_step_seconds or 0.0,
            other.num_stages,
        ),
    )


def what_if_table(plan: Plan) -> Table:
    """What more or less of something would change."""
    table = _table("What if")
    table.add_column("change", ratio=4, overflow="fold")
    for name in ("step", "against this"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan then", ratio=5, overflow="fold")
    for item in plan.what_if:
        seconds = item.predicted_step_seconds
        if seconds is None:
            table.add_row(Text(printable(item.change)), "-", "no room", "none fits")
            continue
        table.add_row(
            Text(printable(item.change)),
            seconds_text(seconds),
            change_text(plan.predicted_step_seconds, seconds),
            stages_text(item.stage_replicas),
        )
    return table


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """A bar of `cells` cells for a share from 0 to 1."""
    eighths = round(8 * cells * min(max(share, 0.0), 1.0))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_PARTS[rest] if rest else "")


def _fact(name: str, value: Text) -> Table:
    """A name and a value that folds beside it, not under it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=12, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row(name, value)
    return grid


def _stage_cell(stage: StagePlan) -> str:
    return str(stage.index)


def _table(title: str, gap: int = 1) -> Table:
    """`gap`: columns of the terminal between those of the table, beside one that is always there."""
    return Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )
