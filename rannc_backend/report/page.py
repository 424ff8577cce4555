"""A plan as one page of HTML that needs nothing else: no script, no network, no other file.

In: a `Plan`. Out: the text of the page. What the template gets are plain numbers and texts; it escapes every
one of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from rannc_backend.ir.plan import Plan, StagePlan
from rannc_backend.report.drawing import ROW_HEIGHT, WIDTH, timeline_drawings
from rannc_backend.report.modules import ModuleNode, children_in_runs, module_tree, stage_modules
from rannc_backend.report.order_bound import order_bound_seconds, order_bound_text
from rannc_backend.report.tables import (
    alternative_text,
    divided_text,
    memory_text,
    outputs_text,
    proof_text,
    shape_text,
    sorted_alternatives,
)
from rannc_backend.report.terms import meaning
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
    rate_text,
    row_gradients_text,
    seconds_text,
    size_text,
    stages_text,
    told_text,
    zero_text,
)
from rannc_backend.schedule.orders import schedule_named
from rannc_backend.schedule.plan_simulation import MAX_SPANS, PlanSimulation, simulate_plan

SHOWN_STAGES = 16  # the others are folded away
_MAX_TREE_ITEMS = 4000
_OPEN_DEPTH = 4
_HUE_STEP = 137.508  # the golden angle: neighbours are far apart, and no two stages soon alike
_FIRST_HUE = 212.0
_SMALLEST_SHARE_OF_LIMIT = 0.2  # below it, bars are drawn to the fullest stage instead of the limit
_MEMORY_PARTS = ("parameter", "gradient", "optimizer", "activation", "buffer", "workspace")
_MEMORY_NAMES = ("weights", "gradients", "optimizer state", "activations", "buffers", "workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a bar: a CSS class, which says its colour and its pattern, percent of the bar's length, what
    a pointer shows.
    """

    kind: str
    percent: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """What the page says of one stage."""

    index: int
    hue: float
    ranks: str
    replicas: str
    modules: str
    seconds: str
    seconds_bar: tuple[Segment, ...]
    facts: tuple[tuple[str, str], ...]
    memory: str
    memory_share: str
    memory_bar: tuple[Segment, ...]
    memory_facts: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class TreeItem:
    """A module of the tree, or a run of equal layers; `hues`: of its stages."""

    name: str
    note: str
    stages: str
    hues: list[float]
    is_open: bool
    children: list[TreeItem] = field(default_factory=list)


def plan_page(plan: Plan, simulation: PlanSimulation | None = None) -> str:
    """The page. `simulation`: of the plan's own settings, where the caller has it already."""
    if simulation is None and 2 * plan.num_micro_batches * plan.num_stages <= MAX_SPANS:
        simulation = simulate_plan(plan)
    folder = resources.files("rannc_backend.report") / "templates"
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in ("plan.html", "macros.html")}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"meaning": meaning, "number": itertools.count(1).__next__}
    style = Markup((folder / "plan.css").read_text(encoding="utf-8"))  # our own file
    return environment.get_template("plan.html").render(style=style, **_context(plan, simulation))


def _context(plan: Plan, simulation: PlanSimulation | None) -> dict[str, Any]:
    views = _stage_views(plan)
    limit, most = plan.memory_limit_bytes, max(stage.predicted.peak_bytes for stage in plan.stages)
    return {
        "title": name_text(plan),
        "shape": shape_text(plan),
        "tiles": _tiles(plan),
        **dict(zip(("binding", "gains", "slowest"), _binding(plan), strict=True)),
        "drawings": () if simulation is None else timeline_drawings(simulation),
        "splits_backward": schedule_named(plan.schedule).splits_backward,
        "hues": [hue(stage.index) for stage in plan.stages],
        "ranks": [_ranks_label(stage) for stage in plan.stages],
        "width": WIDTH,
        "row_height": ROW_HEIGHT,
        "stages": views,
        "shown_stages": SHOWN_STAGES,
        "memory_names": list(zip(_MEMORY_PARTS, _MEMORY_NAMES, strict=True)),
        "memory": memory_text(plan),
        "outputs": outputs_text(plan) if plan.outputs else "",
        "limit_percent": round(100 * limit / _memory_scale(most, limit), 2)
        if limit <= _memory_scale(most, limit)
        else None,
        "limit": size_text(limit),
        "tree": _tree(plan),
        "alternatives": _alternatives(plan),
        "what_if": _what_if(plan),
        "cluster": _cluster(plan),
        "footer": f"schema {plan.schema_version}, fingerprint {printable(plan.fingerprint)[:16]}",
    }


def _binding(plan: Plan) -> tuple[str, str, str]:
    """What binds, what would gain how much, and what is slowest; "" for what a plan of an earlier version
    does not say.
    """
    before, found, slowest = printable(plan.binding).rpartition("; slowest: ")
    name, colon, gains = before.partition(": ") if found else (slowest, "", "")
    return (name, gains, slowest if found else "")


def hue(stage: int) -> float:
    """Colour of a stage, degrees."""
    return round((_FIRST_HUE + stage * _HUE_STEP) % 360, 1)


def _tiles(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Name, value and a remark of the figures on top, and the term that explains the remark, if one does."""
    most, limit = plan.peak_bytes, plan.memory_limit_bytes
    idle = plan.world_size - plan.num_working_ranks
    step, bound = plan.predicted_step_seconds, order_bound_seconds(plan)
    tiles = [
        ("step", seconds_text(step), proof_text(plan), "proof"),
        (
            "stages",
            str(plan.num_stages),
            f"{stages_text(plan.stage_replicas)}{f', {idle} idle' if idle else ''}",
            "",
        ),
        ("micro-batches", str(plan.num_micro_batches), f"of {count_text(plan.batch_rows, 'row')} in all", ""),
        ("schedule", plan.schedule, "", ""),
        *(
            [
                (
                    "lower bound",
                    seconds_text(bound),
                    f"of any order of these stages; {order_bound_text(plan, bound)}",
                    "",
                )
            ]
            if bound
            else []
        ),
        ("stages run by", plan.stage_compiler, "", ""),
        *(
            [
                (
                    "ZeRO",
                    str(plan.zero_stage),
                    f"{zero_text(plan.zero_stage, plan.zero_ngroups)}; {divided_text(plan)}",
                    "",
                )
            ]
            if plan.zero_stage
            else []
        ),
        *([("recompute", "told", told_text(plan.told_recompute), "")] if plan.told_recompute else []),
        *([("offload", plan.offload, offload_text(plan), "")] if plan.offload != "none" else []),
        *([("in fewer bits", "not exact", formats_text(plan), "")] if not plan.formats.are_exact else []),
        *([("sparse gradients", "as rows", rows, "")] if (rows := row_gradients_text(plan)) else []),
        ("idle time", percent_text(mean_idle_share(plan)), "mean of the ranks", ""),
        (
            "peak memory",
            size_text(most),
            f"{percent_text(most / limit)} of the limit" if limit else "no limit",
            "",
        ),
    ]
    if plan.equal_split_seconds is not None and step > 0:
        speedup = plan.equal_split_seconds / step
        tiles.append(
            (
                "against equal stages",
                f"{speedup:.2f} x",
                f"they take {seconds_text(plan.equal_split_seconds)}",
                "",
            )
        )
    return tiles


def mean_idle_share(plan: Plan) -> float:
    """Predicted idle time, the mean over the ranks that have a stage."""
    return sum(stage.predicted.idle_share * stage.num_replicas for stage in plan.stages) / sum(
        plan.stage_replicas
    )


def _ranks_label(stage: StagePlan) -> str:
    text = ranges_text(stage.ranks)
    label = f"rank {text}" if stage.num_replicas == 1 else f"ranks {text}"
    return label if len(label) <= 16 else count_text(stage.num_replicas, "rank")


def _memory_scale(most: int, limit: int) -> int:
    """Bytes that a whole memory bar stands for."""
    return max(most, limit, 1) if most >= _SMALLEST_SHARE_OF_LIMIT * limit else max(most, 1)


def _stage_views(plan: Plan) -> list[StageView]:
    root = module_tree(plan)
    limit, most = plan.memory_limit_bytes, max(stage.predicted.peak_bytes for stage in plan.stages)
    scale = _memory_scale(most, limit)
    slowest = max(_micro_batch_seconds(stage) for stage in plan.stages) or 1.0
    views = []
    for stage in plan.stages:
        cost = stage.predicted
        seconds = [
            ("forward", cost.forward_seconds), ("backward", cost.backward_seconds), ("transfer", cost.transfer_seconds)
        ]  # fmt: skip
        sizes = [
            (part, name, getattr(cost, f"{part}_bytes"))
            for part, name in zip(_MEMORY_PARTS, _MEMORY_NAMES, strict=True)
        ]
        views.append(
            StageView(
                index=stage.index,
                hue=hue(stage.index),
                ranks=f"{'rank' if stage.num_replicas == 1 else 'ranks'} {ranges_text(stage.ranks)}",
                replicas=count_text(stage.num_replicas, "replica"),
                modules=", ".join(stage_modules(root, stage.index)) or "nothing",
                seconds=seconds_text(_micro_batch_seconds(stage)),
                seconds_bar=tuple(
                    Segment(
                        kind=kind,
                        percent=round(100 * value / slowest, 2),
                        title=f"{kind} {seconds_text(value)}",
                    )
                    for kind, value in seconds
                ),
                facts=(
                    *((kind, seconds_text(value)) for kind, value in seconds),
                    ("all-reduce", seconds_text(cost.allreduce_seconds)),
                    ("idle", percent_text(cost.idle_share)),
                    ("kept", kept_text((stage.recompute,), plan.told_recompute)),
                ),
                memory=size_text(cost.peak_bytes),
                memory_share=percent_text(plan.lane_peak_bytes(stage.index) / limit) if limit else "",
                memory_bar=tuple(
                    Segment(
                        kind=part, percent=round(100 * value / scale, 2), title=f"{name} {size_text(value)}"
                    )
                    for part, name, value in sizes
                ),
                memory_facts=tuple((name, size_text(value)) for _, name, value in sizes if value),
            )
        )
    return views


def _micro_batch_seconds(stage: StagePlan) -> float:
    cost = stage.predicted
    return cost.forward_seconds + cost.backward_seconds + cost.transfer_seconds


def _tree(plan: Plan) -> list[TreeItem]:
    root = module_tree(plan)
    left = [_MAX_TREE_ITEMS]
    return _tree_items(root, 0, left)


def _tree_items(node: ModuleNode, depth: int, left: list[int]) -> list[TreeItem]:
    """Items below a module; `left[0]` counts down the items that the page may still have."""
    items = []
    for run in children_in_runs(node):
        if left[0] <= 0:
            items.append(TreeItem("more modules", "", "", [], False))
            break
        left[0] -= 1
        stages = run.stages
        several = len(stages) > 1
        item = TreeItem(
            name=run.name,
            note=f"{run.num_modules} alike" if run.num_modules > 1 else "",
            stages=f"{'stages' if several else 'stage'} {ranges_text(stages)}",
            hues=[hue(stage) for stage in stages],
            is_open=several and depth < _OPEN_DEPTH,
        )
        item.children = _tree_items(run.node, depth + 1, left)
        items.append(item)
    return items


def _alternatives(plan: Plan) -> list[dict[str, Any]]:
    seconds = [
        other.predicted_step_seconds
        for other in plan.alternatives
        if other.predicted_step_seconds is not None
    ]
    slowest = max([plan.predicted_step_seconds, *seconds]) or 1.0
    rows = [
        {
            "shape": f"{stages_text(plan.stage_replicas)}, "
            f"{count_text(plan.num_micro_batches, 'micro-batch', 'micro-batches')}",
            "step": seconds_text(plan.predicted_step_seconds),
            "change": "chosen",
            "percent": round(100 * plan.predicted_step_seconds / slowest, 2),
            "reason": "this plan",
            "chosen": True,
        }
    ]
    for other in sorted_alternatives(plan):
        step = other.predicted_step_seconds
        rows.append(
            {
                "shape": alternative_text(other),
                "step": "no room" if step is None else seconds_text(step),
                "change": "" if step is None else change_text(plan.predicted_step_seconds, step),
                "percent": 0.0 if step is None else round(100 * step / slowest, 2),
                "reason": printable(other.reason),
                "chosen": False,
            }
        )
    return rows


def _what_if(plan: Plan) -> list[dict[str, Any]]:
    rows, step = [], plan.predicted_step_seconds
    for item in plan.what_if:
        seconds = item.predicted_step_seconds
        change = "no plan fits" if seconds is None else change_text(step, seconds)
        rows.append(
            {
                "change": printable(item.change),
                "effect": change,
                "percent": 0.0
                if seconds is None or not step
                else round(100 * min(abs(seconds / step - 1), 1.0), 1),
                "tone": "same" if change == "same" else "better" if change.startswith("-") else "worse",
                "plan": ""
                if seconds is None
                else f"{seconds_text(seconds)} with {stages_text(item.stage_replicas)}",
            }
        )
    return rows


def _cluster(plan: Plan) -> list[tuple[str, str]]:
    cluster = plan.cluster
    rows = [
        ("cluster", printable(cluster.name)),
        (
            "devices",
            f"{cluster.num_devices} x {printable(cluster.device_name)}, {cluster.devices_per_node} per node",
        ),
        (
            "memory of a device",
            f"{size_text(cluster.device_memory_bytes)}, plans may use {limit_text(plan.memory_limit_bytes)}",
        ),
        ("memory bandwidth", rate_text(cluster.memory_bytes_per_second)),
        *(
            (f"peak {printable(rate.dtype)}", f"{rate.flops_per_second / 1e12:.3g} TFLOP/s")
            for rate in cluster.peak_flops
        ),
        *(
            (f"reached by {printable(entry.operator_class)}", percent_text(entry.share))
            for entry in cluster.efficiencies
        ),
        ("start of an operator", seconds_text(cluster.launch_seconds)),
        (
            "link within a node",
            _link(cluster.intra_node_bytes_per_second, cluster.intra_node_latency_seconds),
        ),
        (
            "link between nodes",
            _link(cluster.inter_node_bytes_per_second, cluster.inter_node_latency_seconds),
        ),
        ("costs", printable(plan.costs_from)),
    ]
    return rows


def _link(bytes_per_second: float, latency_seconds: float) -> str:
    return f"{rate_text(bytes_per_second)}, {seconds_text(latency_seconds)} latency"
