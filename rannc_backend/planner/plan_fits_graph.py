"""Whether a plan may be deployed: a file that somebody edited is checked as strictly as a plan that was just
computed.

In: a plan (whose parts agree with each other, see ir/plan_checks.py), the graph, the options and the memory
of a device. Out: nothing, or a `PlanError` that names the difference and what to change.
`projection.stage_of_plan` checks where the nodes are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import BYTES_PER_GB, PlanError
from rannc_backend.ir.graph_input import GraphInput, ParameterInput
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_checks import check_against, lane_text
from rannc_backend.passes.batch.batch_split import BatchSplit, BufferOutput, UserRows
from rannc_backend.planner.blocks.cut_blocks import parameter_use
from rannc_backend.planner.blocks.pins import StagePins, find_pins
from rannc_backend.planner.blocks.staged_nodes import StagedGraph, find_staged_nodes, home_of_cloned
from rannc_backend.planner.cluster.asked_job import asked_ranks, memory_limit
from rannc_backend.planner.cost.output_bytes import ASKED, why_left_out
from rannc_backend.planner.projection import recomputed_nodes, stage_of_plan
from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.schedule.orders import ScheduleName, on_lanes, schedule_named, schedule_names
from rannc_backend.settings.choices import MARKED
from rannc_backend.settings.options import Config
from rannc_backend.stages.cut_stages import OutputsLeftOut, StageCut, cut_stages

logger = logging.getLogger(__name__)

_CURE = "correct the plan, or let the planner write it again."


def check_plan(
    plan: Plan,
    split: BatchSplit,
    inputs: Sequence[GraphInput],
    *,
    config: Config,
    fingerprint: str,
    world_size: int,
    device_memory_bytes: int,
    possible_schedules: Collection[str],
    in_rows: Collection[str] = (),
) -> dict[str, int]:
    """The stage of every staged node, if the plan fits this graph, these options and these devices.

    Args:
        device_memory_bytes: what one device of this run has; the option mem_limit_gb comes before it.
        possible_schedules: those that give exact results for this graph.
        in_rows: the parameters whose gradients are kept as rows.

    Raises:
        PlanError: see the module docstring.
    """
    memory = memory_limit(config, device_memory_bytes) * (1 - config.mem_margin)
    check_against(plan, fingerprint=fingerprint, world_size=world_size)
    _check_ranks(plan)
    _check_rows(plan)
    if split.whole_batch is not None:
        _check_whole_batch(plan)
    if plan.schedule not in possible_schedules:
        raise PlanError(
            f"the plan's schedule is {plan.schedule}, which does not give exact results for this model",
            cure=f"use {' or '.join(sorted(possible_schedules))}, or let the planner write the plan again.",
        )
    if on_lanes(schedule_named(plan.schedule), plan.lanes) is None:
        lanes = "; ".join(map(lane_text, plan.lanes))
        raise PlanError(
            f"the plan's schedule {plan.schedule} does not run on its ranks, which have {lanes}",
            cure="give the stages other ranks, or let the planner write the plan again.",
        )
    stage_of = stage_of_plan(plan, split.rowwise, split.layouts, inputs)
    staged = find_staged_nodes(split.rowwise, split.layouts, inputs)
    _check_buffers(plan, split, staged, stage_of)
    _check_pins(plan, [atom[0] for atom in staged.atoms], StagePins.from_config(config), stage_of)
    for lane in plan.lanes:
        _check_memory(plan, lane, split.rowwise, inputs, memory, config, in_rows)
    return stage_of


def check_options(
    plan: Plan, config: Config, possible_schedules: Sequence[ScheduleName], *, whole_batch: bool = False
) -> None:
    """That a loaded plan is what the options ask for; raises `PlanError`.

    ``possible_schedules``: of the graph; one that is not among them was not given to who saved the plan
    either. ``whole_batch``: of the graph; then there is one micro-batch and replica, whatever is asked for.
    """
    asked: tuple[tuple[str, object, object], ...] = (
        ("num_ranks" if config.num_ranks else "mesh", asked_ranks(config), plan.world_size),
        (
            "mesh",
            f"nodes of {config.mesh_shape[1]}" if config.mesh_shape else "",
            f"nodes of {plan.cluster.devices_per_node}",
        ),
        (
            "micro_batch_rows",
            0 if whole_batch else config.micro_batch_rows,
            plan.batch_rows / plan.num_micro_batches,
        ),
        ("partition_num", config.partition_num, plan.num_stages),
        ("schedule", config.schedule if config.schedule in possible_schedules else "", plan.schedule),
        ("pipeline_num", 0 if whole_batch else config.pipeline_num, plan.num_micro_batches),
        (
            "stage_compiler",
            "" if config.stage_compiler == "auto" else config.stage_compiler,
            plan.stage_compiler,
        ),
        (
            "outputs",
            "all" if config.outputs == "all" else "",
            "none beside the loss" if plan.outputs_left_out else "all",
        ),
        ("recompute_modules", config.recompute_modules, plan.told_recompute),
        ("recompute", MARKED if config.recompute == MARKED else "", plan.told_recompute),
        ("zero_stage", config.zero_stage.removeprefix("auto"), str(plan.zero_stage)),
        ("zero_ngroups", config.zero_ngroups if config.zero_level else 0, plan.zero_ngroups),
        ("offload", "" if config.offload in ("none", "auto") else config.offload, plan.offload),
        (
            "stage_replicas",
            "" if whole_batch else config.stage_replicas,
            ",".join(map(str, plan.stage_replicas)),
        ),
    )
    if config.replica_num and not whole_batch and set(plan.stage_replicas) != {config.replica_num}:
        asked += (("replica_num", config.replica_num, ",".join(map(str, plan.stage_replicas))),)
    last = config.recompute_last_stage
    again = max((stage.index for stage in plan.stages if stage.recompute < 1.0), default=last)
    if 0 <= last < again:
        asked += (("recompute_last_stage", f"none after stage {last}", f"recompute in stage {again}"),)
    if plan.offload != "none" and config.offload == "none":
        raise PlanError(
            f"the plan in {config.deployment_file!r} keeps parameters on the host, and the option offload does not",
            cure=f"set offload to {plan.offload}, or plan again.",
        )
    for item, wanted, found in asked:
        if wanted and wanted != found:
            raise PlanError(
                f"the option {item} asks for {wanted}, and the plan in {config.deployment_file!r} has "
                f"{found}",
                cure=f"leave {item} out when a deployment is loaded, or plan again.",
            )
    if broken := PipelineLimits.of(config).broken_by_plan(plan):
        raise PlanError(
            f"the plan in {config.deployment_file!r} does not keep an option: {broken}",
            cure="change that option or leave it out when a deployment is loaded, or plan again.",
        )


def _check_ranks(plan: Plan) -> None:
    for stage in plan.stages:
        if list(stage.ranks) != sorted(stage.ranks):
            raise PlanError(
                f"the ranks of stage {stage.index} are {list(stage.ranks)}, not in ascending order",
                cure=_CURE,
            )
        if not stage.nodes and plan.num_stages > 1:
            raise PlanError(f"stage {stage.index} of {plan.num_stages} has no nodes", cure=_CURE)


def _check_rows(plan: Plan) -> None:
    most = max(plan.stages, key=lambda stage: stage.num_replicas)
    if most.num_replicas > plan.batch_rows:
        raise PlanError(
            f"stage {most.index} has {most.num_replicas} replicas, and the batch that the plan is for has "
            f"{plan.batch_rows} rows",
            cure="give the stage fewer ranks, or plan for a larger batch.",
        )
    if plan.num_micro_batches * most.num_replicas > plan.batch_rows:
        raise PlanError(
            f"{plan.num_micro_batches} micro-batches of {plan.batch_rows} rows do not have a row for each of "
            f"the {most.num_replicas} replicas of stage {most.index}",
            cure=f"use at most {plan.batch_rows // most.num_replicas} micro-batches, or fewer replicas.",
        )


def _check_whole_batch(plan: Plan) -> None:
    if plan.num_micro_batches > 1 or max(stage.num_replicas for stage in plan.stages) > 1:
        raise PlanError(
            "samples of a batch meet in this model, so that a step runs as one micro-batch on one replica per "
            f"stage, and the plan has {plan.num_micro_batches} micro-batches and "
            f"{max(stage.num_replicas for stage in plan.stages)} replicas",
            cure=_CURE,
        )


def _check_buffers(plan: Plan, split: BatchSplit, staged: StagedGraph, stage_of: dict[str, int]) -> None:
    nodes = {node.name: node for node in split.rowwise.graph.nodes}
    updated: list[set[str]] = [set() for _ in plan.stages]
    for output in split.outputs:
        if isinstance(output, BufferOutput):
            home: fx.Node | None = nodes[output.name]
            if output.name not in stage_of:
                home = home_of_cloned(staged, nodes[output.name])
            updated[stage_of[home.name] if home is not None else 0].add(output.fqn)
    for stage, wanted in zip(plan.stages, updated, strict=True):
        if extra := sorted(set(stage.updated_buffers) - wanted):
            raise PlanError(
                f"stage {stage.index} lists buffer {extra[0]!r}, whose new value is not computed there",
                cure=_CURE,
            )
        if absent := sorted(wanted - set(stage.updated_buffers)):
            raise PlanError(
                f"stage {stage.index} does not list buffer {absent[0]!r}, whose new value it computes",
                cure=_CURE,
            )


def _check_pins(plan: Plan, atoms: Sequence[fx.Node], pins: StagePins, stage_of: Mapping[str, int]) -> None:
    """That modules are where the options stage_starts, keep_together and stage_pins ask for them. Raises
    UnknownModuleError too.
    """
    places = find_pins(pins, [str(node.meta.get("module_path", "")) for node in atoms]).atoms
    nodes_of = {name: [atoms[place] for place in found] for name, found in places.items()}
    for name in pins.together:
        found = sorted({stage_of[node.name] for node in nodes_of[name]})
        if len(found) > 1:
            raise _pin_error("keep_together", name, f"it is in stages {found[0]} and {found[-1]}")
    for name, wanted in pins.stages:
        found = sorted({stage_of[node.name] for node in nodes_of[name]} - {wanted})
        if found:
            raise _pin_error("stage_pins", f"{name}={wanted}", f"it is in stage {found[0]}")
    for name in pins.starts:
        stage, after = _begin_of(plan, nodes_of[name], stage_of)
        if after:
            raise _pin_error("stage_starts", name, f"it begins within stage {stage}, after {after!r}")
    found_at = [_begin_of(plan, nodes_of[name], stage_of) for name in pins.pivots]
    illegal = set(range(1, plan.num_stages)) - {stage for stage, after in found_at if not after}
    if pins.pivots and illegal:
        first = plan.stages[min(illegal)].nodes[0]
        raise _pin_error("stage_pivots", ", ".join(pins.pivots), f"stage {min(illegal)} begins at {first!r}")


def _begin_of(plan: Plan, nodes: Sequence[fx.Node], stage_of: Mapping[str, int]) -> tuple[int, str]:
    """The stage where the nodes of a module begin, and a node of that stage that comes before them; "" for none."""
    stage = plan.stages[min(stage_of[node.name] for node in nodes)]
    own = {node.name for node in nodes}
    first = next(node for node in nodes if stage_of[node.name] == stage.index)
    before = _before(first, set(stage.nodes)) - own
    begins = not stage.blocks or own & set(plan.blocks[min(stage.blocks)].nodes)
    return stage.index, "" if begins and not before else min(before, default=stage.nodes[0])


def _before(node: fx.Node, names: Collection[str]) -> set[str]:
    """Those of `names` that the node depends on through such."""
    found: set[str] = set()
    stack = [node]
    while stack:
        for argument in stack.pop().all_input_nodes:
            if argument.name in names and argument.name not in found:
                found.add(argument.name)
                stack.append(argument)
    return found


def _pin_error(option: str, wanted: str, where: str) -> PlanError:
    return PlanError(
        f"the option {option} asks for {wanted}, and in the plan {where}",
        cure=f"correct the plan, leave {option} out when it is loaded, or plan again.",
    )


def _check_memory(
    plan: Plan,
    lane: Sequence[int],
    rowwise: fx.GraphModule,
    inputs: Sequence[GraphInput],
    limit_bytes: float,
    config: Config,
    in_rows: Collection[str],
) -> None:
    """Of the stages of the same ranks: by the plan's own figure, and by what their parameters need at least, whatever
    the plan says.
    """
    values = {node.name: node.meta.get("val") for node in rowwise.graph.find_nodes(op="placeholder")}
    own = {name for index in lane for name in plan.stages[index].parameters}
    num_replicas = plan.stages[lane[0]].num_replicas
    # Of a parameter that one of several replicas updates, each has a share of the state on average.
    least, share = 0.0, plan.num_updaters(num_replicas) / num_replicas
    gradients = 0
    for item in inputs:
        value = values.get(item.name)
        if isinstance(item, ParameterInput) and item.fqn in own and isinstance(value, torch.Tensor):
            use = parameter_use(
                item.fqn,
                value,
                trainable=item.requires_grad and config.training,
                wide_sums=config.wide_sums,
                least_elements=config.small_tensor_elements,
            )
            if item.fqn in in_rows:
                use = replace(use, table_rows=1, looked_up=0)
            offload = plan.offload != "none"
            least += use.held_bytes(config.opt_param_factor * share, offload=offload)
            gradients += (use.sum_bytes if offload else use.gradient_bytes) * config.wide_sums
    # Who saved the plan may have summed gradients in another dtype.
    wider = max(0, gradients - sum(plan.stages[index].predicted.gradient_bytes for index in lane))
    needed = max(least, float(plan.lane_peak_bytes(lane[0]) + wider))
    if needed > limit_bytes:
        raise PlanError(
            f"{lane_text(lane)} {'needs' if len(lane) == 1 else 'need'} {needed / BYTES_PER_GB:.3f} GB on each of "
            f"{'its' if len(lane) == 1 else 'their'} ranks, and plans may use {limit_bytes / BYTES_PER_GB:.3f} GB",
            cure="give the stage fewer blocks, raise mem_limit_gb, or plan again for these devices.",
        )


def exact_schedules(split: BatchSplit, needs_grad: Collection[str]) -> tuple[ScheduleName, ...]:
    """Schedules that give exact results: those with backwards in the forward call where a loss inside of the
    model is linear in its sums over rows.
    """
    is_linear = split.has_loss(needs_grad) and split.linear
    return tuple(name for name in schedule_names() if is_linear or not schedule_named(name).eager_backward)


def outputs_left_out(
    plan: Plan,
    analysis: GraphAnalysis,
    stage_of: Mapping[str, int],
    planned_lengths: Sequence[Sequence[int]],
    config: Config,
) -> OutputsLeftOut:
    """Why the outputs of a graph that have rows are not delivered in training, or always.

    What the plan says of its own graph holds for all that have a loss. A plan of a graph without outputs is asked
    whether it has room for them. The answer is the same on all ranks.

    Args:
        planned_lengths: by rank, those that memory is planned for.
    """
    if config.outputs == "loss":
        return OutputsLeftOut(ASKED, always=True)
    if config.outputs == "all" or not analysis.split.has_loss(analysis.needs_grad):
        return OutputsLeftOut()
    if plan.outputs:
        told = "the plan was made with outputs='loss'" if plan.outputs_left_out == ASKED else ""
        return OutputsLeftOut(told or plan.outputs_left_out)
    names = {output.name for output in analysis.split.user_outputs if isinstance(output, UserRows)}
    longest = tuple(map(max, zip(*planned_lengths, strict=True)))
    sizes = {name: int(analysis.value(name, longest).bytes_per_row) for name in names}
    own_bytes = -(-plan.batch_rows // plan.world_size) * sum(sizes.values())
    needed = [
        own_bytes
        + -(-plan.batch_rows // stage.num_replicas)
        * sum(size for name, size in sizes.items() if stage_of.get(name, 0) == stage.index)
        for stage in plan.stages
    ]
    return OutputsLeftOut(why_left_out(plan.stages, needed, plan.memory_limit_bytes))


def cut_by_plan(
    plan: Plan,
    analysis: GraphAnalysis,
    stage_of: Mapping[str, int],
    planned_lengths: Sequence[Sequence[int]],
    config: Config,
) -> StageCut:
    """The stages of a graph, and what they hand on. ``planned_lengths``: see `outputs_left_out`.

    Raises:
        UnsupportedModelError: the graph has sparse gradients, and the options cannot have them.
    """
    _check_sparse(analysis, config)
    left_out = outputs_left_out(plan, analysis, stage_of, planned_lengths, config)
    return cut_stages(analysis, stage_of, plan.num_stages, left_out, recomputed_nodes(plan, analysis))


def _check_sparse(analysis: GraphAnalysis, config: Config) -> None:
    for table in analysis.captured.sparse_tables[:1]:
        if config.check_gradients:
            table.refuse("the option check_gradients compares dense gradients")


def choose_schedule(
    split: BatchSplit, needs_grad: Collection[str], config: Config, *, says_so: bool
) -> ScheduleName:
    """The schedule that the options ask for, where it gives exact results; else the first that does, with a warning where
    `says_so` (on one rank) and the call is trained.
    """
    possible = exact_schedules(split, needs_grad)
    if config.schedule in possible:
        return config.schedule
    if says_so and torch.is_grad_enabled() and config.schedule in schedule_names():
        why = (
            "the loss is not a linear function of sums over samples"
            if split.has_loss(needs_grad)
            else "the model returns no loss"
        )
        logger.warning("schedule %s is not possible (%s); %s is used", config.schedule, why, possible[0])
    return possible[0]
