"""Plans a model without process groups or ranks, wherever it is: on the CPU, on a GPU, or on "meta", where it has no memory.

In: a model and the arguments of one call, or an analysed graph; the options, the cluster and the number of devices to plan for. Out: a
`Plan`. A session plans with the same functions as the command line, so that a plan made without ranks is the plan of the ranks.

Terms. Rows to plan for: those of one training step, of all replicas together; the example batch may have any number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rannc_backend.analysis import GraphAnalysis, analyze
from rannc_backend.block_partitions import partition_blocks
from rannc_backend.capture_example import convert_model, convert_values, tensors_in
from rannc_backend.capture_model import capture_model
from rannc_backend.config import Config
from rannc_backend.cost.cluster import Cluster
from rannc_backend.cost.pricing import BlockPricer
from rannc_backend.ir.plan import Plan
from rannc_backend.narrator import Narrator
from rannc_backend.partition.plan_checks import exact_schedules
from rannc_backend.partition.planner import block_graph, plan_blocks
from rannc_backend.planning_file import PlannableModel
from rannc_backend.pricers import Pricing
from rannc_backend.profiling import LeadingProfiler
from rannc_backend.progress import Progress

_META = torch.device("meta")


def plan_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: Config,
    num_devices: int,
    cluster: Cluster,
    batch_rows: int,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    narrator: Narrator | None = None,
) -> Plan:
    """Plan training ``model``, called with such arguments, for steps of ``batch_rows`` rows on ``num_devices`` devices of ``cluster``.

    A model with any part on "meta" goes there as a whole. ``dtype`` is given to all its floating-point parameters, buffers and inputs.
    Nothing is computed.

    Raises:
        RanncError: whatever capture, analysis or search refuse; InfeasiblePlanError says the smallest memory or number of devices.
    """
    narrator = narrator or Narrator()
    analysis = analyze_model(model, args, kwargs, cluster=cluster, dtype=dtype, narrator=narrator)
    return plan_analysis(
        analysis,
        config=config,
        num_devices=num_devices,
        cluster=cluster,
        batch_rows=batch_rows,
        progress=progress,
        narrator=narrator,
    )


def analyze_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    cluster: Cluster,
    dtype: torch.dtype | None = None,
    narrator: Narrator | None = None,
) -> GraphAnalysis:
    """Capture and analyse, as `plan_model` does first."""
    narrator = narrator or Narrator()
    call_args, call_kwargs = tuple(args), dict(kwargs)
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((call_args, call_kwargs))]
    nowhere = any(tensor.device == _META for tensor in tensors)
    if nowhere or dtype is not None:
        convert_model(model, device=_META if nowhere else None, dtype=dtype)
        call_args, call_kwargs = convert_values((call_args, call_kwargs), _META if nowhere else None, dtype)
    with narrator.step("capture") as details:
        captured = capture_model(model, call_args, call_kwargs, device=trace_device(cluster) if nowhere else None)
        details.append(f"{len(captured.graph_module.graph.nodes)} nodes")
    with narrator.step("analysis") as details:
        analysis = analyze(captured)
        details.append(f"{len(analysis.split.rowwise.graph.nodes)} nodes with rows")
    return analysis


def plan_analysis(
    analysis: GraphAnalysis,
    *,
    config: Config,
    num_devices: int,
    cluster: Cluster,
    batch_rows: int,
    progress: Progress | None = None,
    narrator: Narrator | None = None,
    profiler: LeadingProfiler | None = None,
) -> Plan:
    """Plan an analysed graph; see `plan_model`. With a `profiler`, blocks may be measured; the other ranks must be ready for it."""
    model = prepare(analysis, config=config, num_devices=num_devices, cluster=cluster, batch_rows=batch_rows, narrator=narrator)
    return plan_prepared(
        model,
        config=config,
        num_devices=num_devices,
        cluster=cluster,
        batch_rows=batch_rows,
        progress=progress,
        narrator=narrator,
        profiler=profiler,
    )


def prepare(
    analysis: GraphAnalysis,
    *,
    config: Config,
    num_devices: int,
    cluster: Cluster,
    batch_rows: int,
    narrator: Narrator | None = None,
) -> PlannableModel:
    """Blocks, balanced for these devices and rows, and what each distinct one computes and keeps at every activation budget."""
    narrator = narrator or Narrator()
    captured = analysis.captured
    with narrator.step("blocks") as details:
        graph = block_graph(
            analysis.split,
            captured.inputs,
            analysis.needs_grad,
            config,
            cluster=replace(cluster, num_devices=num_devices),
            batch_rows=batch_rows,
            rows_symbol=captured.rows_symbol,
        )
        distinct = {block.structure: block for block in graph.blocks}
        details.append(f"{len(graph.blocks)} blocks, {len(distinct)} distinct")
    with narrator.step("prices"):
        compiler = "inductor" if config.stage_compiler == "auto" else config.stage_compiler
        rows = max(1, batch_rows // num_devices)
        partitions = None
        if graph.blocks:
            partitions = partition_blocks(analysis, graph, compiler=compiler, rows=rows, budget=config.fixed_recompute)
        return PlannableModel.of(
            graph,
            partitions,
            fingerprint=captured.fingerprint,
            model_name=type(captured.root_module).__name__,
            schedules=exact_schedules(analysis.split, analysis.needs_grad),
            config=config,
        )


def plan_prepared(
    model: PlannableModel,
    *,
    config: Config,
    num_devices: int,
    cluster: Cluster,
    batch_rows: int,
    progress: Progress | None = None,
    narrator: Narrator | None = None,
    profiler: LeadingProfiler | None = None,
) -> Plan:
    """Plan from blocks that were made before, perhaps for other devices; see `plan_model`. BlocksFileError: under other options."""
    model.check_options(config)
    cluster = replace(cluster, num_devices=num_devices)
    narrator = narrator or Narrator()
    pricing = Pricing(
        graph=model.graph, partitions=model, config=config, cluster=cluster, batch_rows=batch_rows, profiler=profiler
    )

    def search(pricer: BlockPricer) -> Plan:
        with narrator.step("search") as details:
            plan = plan_blocks(
                model.graph,
                config,
                cluster=cluster,
                batch_rows=batch_rows,
                schedules=model.searched_schedules(config),
                fingerprint=model.fingerprint,
                model_name=model.model_name,
                pricer=pricer,
                progress=progress,
            )
            details.append(f"{plan.num_stages} stages")
        return plan

    return pricing.plan(search, cancelled=progress.cancelled if progress is not None else lambda: False)


def trace_device(cluster: Cluster) -> torch.device:
    """The device to take a model on "meta" for: the cluster's kind, where this torch can trace for it."""
    # Without CUDA torch aborts the process as soon as autograd asks for the device of a tensor.
    is_gpu = cluster.device.name != "cpu"
    return torch.device("cuda", 0) if is_gpu and torch.cuda.is_available() else torch.device("cpu")
