"""Plans a model without process groups or ranks, wherever it is: on the CPU, on a GPU, or on "meta", where it
has no memory.

In: a model and the arguments of one call, or an analysed graph; the question (planning_search.py). Out: a
`Plan`. A session plans with the same functions as the command line, so that a plan made without ranks is the
plan of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rannc_backend.capture.analysis import GraphAnalysis, analyze
from rannc_backend.capture.detached_writes import tensors_in
from rannc_backend.capture.nonstrict.arguments import BatchDims
from rannc_backend.capture.nonstrict.meta_model import (
    capture_model,
    convert_model,
    convert_values,
)
from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.graph_input import ParameterInput
from rannc_backend.ir.plan import Plan
from rannc_backend.log.step_timer import StepTimer
from rannc_backend.planner.blocks.block_partitions import partition_blocks
from rannc_backend.planner.blocks.cut_blocks import block_graph
from rannc_backend.planner.blocks.formats import with_looked_up
from rannc_backend.planner.blocks.measure import LeadingProfiler
from rannc_backend.planner.blocks.told_recompute import check_told, told_recompute, with_pivots
from rannc_backend.planner.blocks.traced_stages import MAX_NODES, TracedStages
from rannc_backend.planner.blocks_file import PlannableModel
from rannc_backend.planner.cluster.asked_job import memory_limit
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.pricing import BUDGETS, NoPartitions, Partitions, priced_budgets
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.planner.cost.small_models import SMALL_MEMORY_SHARE, quick, settled, stage_compiler
from rannc_backend.planner.plan_blocks import PlanningQuestion, plan_prepared
from rannc_backend.planner.plan_fits_graph import exact_schedules
from rannc_backend.settings.options import Config

_META = torch.device("meta")


def plan_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    question: PlanningQuestion,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Plan training ``model``, called with such arguments.

    A model with any part on "meta" goes there as a whole. ``dtype`` is given to all its floating-point
    parameters, buffers and inputs. Nothing is computed.

    Raises:
        RanncError: whatever capture, analysis or search refuse; InfeasiblePlanError says the smallest memory
        or number of devices.
    """
    analysis = analyze_model(
        model,
        args,
        kwargs,
        cluster=question.cluster,
        config=question.config,
        dtype=dtype,
        step_timer=question.step_timer,
    )
    return plan_analysis(analysis, question)


def analyze_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    cluster: Cluster,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    step_timer: StepTimer | None = None,
) -> GraphAnalysis:
    """Capture and analyse, as `plan_model` does first."""
    step_timer = step_timer or StepTimer()
    call_args, call_kwargs = tuple(args), dict(kwargs)
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((call_args, call_kwargs))]
    nowhere = any(tensor.device == _META for tensor in tensors)
    if nowhere or dtype is not None:
        convert_model(model, device=_META if nowhere else None, dtype=dtype)
        call_args, call_kwargs = convert_values((call_args, call_kwargs), _META if nowhere else None, dtype)
    device = trace_device(cluster) if nowhere else None
    with step_timer.step("capture") as details, _autocast(config, device or tensors[0].device):
        batch_dims = BatchDims.of_option({} if config is None else config.batch_dims)
        captured = capture_model(model, call_args, call_kwargs, device=device, batch_dims=batch_dims)
        details.append(f"{len(captured.graph_module.graph.nodes)} nodes")
    with step_timer.step("analysis") as details:
        analysis = analyze(
            captured,
            whole_batch="auto" if config is None else config.whole_batch,
            batch_norm="micro_batch" if config is None else config.batch_norm,
        )
        details.append(f"{len(analysis.split.rowwise.graph.nodes)} nodes with rows")
    return analysis


def _autocast(config: Config | None, device: torch.device) -> AbstractContextManager[object]:
    """What option autocast puts around a call."""
    if config is None or config.autocast == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.autocast))


def plan_analysis(
    analysis: GraphAnalysis,
    question: PlanningQuestion,
    *,
    profiler: LeadingProfiler | None = None,
    seen: GraphAnalysis | None = None,
) -> Plan:
    """Plan an analysed graph; see `plan_model` and `plan_prepared`. Small models on CPUs by the quick prices,
    where memory is ample.

    `seen`: the graph at the lengths at which its blocks are timed, where those are others than memory is planned for.
    """
    kind = question.cluster.device.kind
    analysis = for_use(analysis, question.config)
    seen = None if seen is None else for_use(seen, question.config)
    config = settled_for(analysis, question.config, question.cluster)
    by_rules = None if profiler is not None else quick(config, kind, num_elements(analysis))
    if by_rules is not None:
        with suppress(InfeasiblePlanError):
            plan = _plan_analysis(analysis, replace(question, config=by_rules), None, seen)
            if (
                max(stage.predicted.peak_bytes for stage in plan.stages)
                <= SMALL_MEMORY_SHARE * plan.memory_limit_bytes
            ):
                return plan
    return _plan_analysis(analysis, replace(question, config=config), profiler, seen)


def _plan_analysis(
    analysis: GraphAnalysis,
    question: PlanningQuestion,
    profiler: LeadingProfiler | None,
    seen: GraphAnalysis | None,
) -> Plan:
    model = prepare(analysis, question)
    timed = None if seen is None else prepare(seen, question, like=model.graph)
    traced = None
    config = question.config
    if model.graph.blocks and config.stage_memory != "blocks" and not config.prices_by_rules:
        traced = TracedStages(
            analysis=analysis,
            graph=model.graph,
            compiler=stage_compiler(config),
            segments=Segments(model.graph, fused=stage_compiler(config) == "inductor"),
            told=told_recompute(config.told_recompute, analysis),
            most_nodes=math.inf if config.stage_memory == "traced" else MAX_NODES,
            least_elements=config.small_tensor_elements,
        )
    return plan_prepared(model, question, profiler=profiler, whole_stages=traced, timed=timed)


def for_use(analysis: GraphAnalysis, config: Config) -> GraphAnalysis:
    """The graph as it is planned for: without option training nothing needs a gradient."""
    if config.training:
        return analysis
    inputs = tuple(replace(each, requires_grad=False) for each in analysis.captured.inputs)
    return replace(
        analysis,
        needs_grad=frozenset(),
        differentiable_outputs=frozenset(),
        captured=replace(analysis.captured, inputs=inputs),
    )


def settled_for(analysis: GraphAnalysis, config: Config, cluster: Cluster) -> Config:
    """The options with the compiler of stages that this model gets on these devices."""
    return settled(config, cluster.device.kind, num_elements(analysis))


def num_elements(analysis: GraphAnalysis) -> int:
    """Elements of all parameters that the graph reads."""
    return sum(
        analysis.node(spec.name).meta["val"].numel()
        for spec in analysis.captured.inputs
        if isinstance(spec, ParameterInput)
    )


def prepare(
    analysis: GraphAnalysis, question: PlanningQuestion, *, like: BlockGraph | None = None
) -> PlannableModel:
    """Blocks, balanced for these devices and rows, and what each distinct one computes and keeps at every
    activation budget. `like`: the blocks of the same graph at other lengths.
    """
    analysis = for_use(analysis, question.config)
    captured, config = analysis.captured, settled_for(analysis, question.config, question.cluster)
    check_told(config.told_recompute, analysis)
    recomputed = told_recompute(config.told_recompute, analysis)
    with question.step_timer.step("blocks") as details:
        graph = block_graph(
            analysis.split,
            captured.inputs,
            analysis.needs_grad,
            with_pivots(config, analysis),
            cluster=question.cluster,
            batch_rows=question.batch_rows,
            rows_symbol=captured.rows_symbol,
            like=like,
            recomputed=recomputed,
        )
        graph = with_looked_up(graph, analysis, config.sparse_gradients)
        distinct = {block.structure: block for block in graph.blocks}
        details.append(f"{len(graph.blocks)} blocks, {len(distinct)} distinct")
    held = sum(use.held_bytes(config.opt_param_factor, offload=False) for use in graph.parameters)
    is_large = held > memory_limit(config, question.cluster.device.memory_bytes)
    is_told = bool(config.told_recompute)
    budgets = priced_budgets(config.fixed_recompute, is_told=is_told, is_large=is_large)
    with question.step_timer.step("prices"):
        partitions: Partitions = NoPartitions(budgets if config.fixed_recompute is not None else BUDGETS[:1])
        if graph.blocks and not config.prices_by_rules:
            partitions = partition_blocks(
                analysis,
                graph,
                compiler=stage_compiler(config),
                # About how many a replica computes: partitions weigh sizes with it.
                rows=question.batch_rows
                if graph.whole_batch
                else max(1, question.batch_rows // question.cluster.num_devices),
                budgets=budgets,
                recomputed=recomputed,
                progress=question.progress,
                least_elements=config.small_tensor_elements,
            )
        return PlannableModel.of(
            graph,
            partitions,
            fingerprint=captured.plan_fingerprint,
            model_name=type(captured.root_module).__name__,
            schedules=exact_schedules(analysis.split, analysis.needs_grad),
            config=config,
        )


def trace_device(cluster: Cluster) -> torch.device:
    """The device to take a model on "meta" for: the cluster's kind, where this torch can trace for it."""
    # Without CUDA torch aborts the process as soon as autograd asks for the device of a tensor.
    is_gpu = cluster.device.kind == "cuda" and torch.cuda.is_available()
    return torch.device("cuda", 0) if is_gpu else torch.device("cpu")
