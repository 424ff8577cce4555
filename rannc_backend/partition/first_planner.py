"""The first planner: a row-wise graph, a cluster and the user's limits in, the fastest predicted `Plan` out.

Blocks (partition/blocks.py), numbers (partition/stage_costs.py), exact search (partition/stage_search.py), then the plan with what
binds it and the alternatives that lost. Ranks go to stages in order, consecutive ranks to each. Deterministic.

Settings that cannot be met because the model or the batch is too small are lowered with a warning; those that the number of
ranks or the memory forbids are an `InfeasiblePlanError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from rannc_backend.config import Config
from rannc_backend.cost.cluster import Cluster, generic_gpu, local_cpu
from rannc_backend.cost.expressions import evaluate
from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import SCHEMA_VERSION, Alternative, BlockPlan, Plan, RowCost, StageCost, StagePlan
from rannc_backend.partition.blocks import build_block_graph
from rannc_backend.partition.pins import StagePins
from rannc_backend.partition.stage_costs import StageCosts, useful_micro_batches
from rannc_backend.partition.stage_search import (
    SearchProblem,
    Solution,
    is_feasible,
    memory_bytes,
    most_devices,
    search,
    smallest_memory,
)
from rannc_backend.partition.staged_nodes import Input, find_staged_nodes
from rannc_backend.passes.batch_split import BatchSplit

logger = logging.getLogger(__name__)

_MOST_DEVICES_SUGGESTED = 4096


def plan_stages(
    split: BatchSplit,
    inputs: Sequence[Input],
    needs_grad: Collection[str],
    config: Config,
    *,
    world_size: int,
    batch_rows: int,
    fingerprint: str,
    cluster: Cluster | None = None,
    device: torch.device | None = None,
    rows_symbol: sympy.Symbol | None = None,
    model_name: str = "",
    stage_replicas: tuple[int, ...] | None = None,
) -> Plan:
    """Plan the model for `world_size` ranks and batches of about `batch_rows` rows.

    Args:
        split: the graph; `inputs`: its placeholders; `needs_grad`: names of the values that get a gradient in training.
        cluster: the machines; None: this machine, with the kind of `device` (default: CPU).
        rows_symbol: if given, all sizes must be over it.
        stage_replicas: fixes stages and replicas, as the option of that name does.

    Raises `InfeasiblePlanError` with the smallest memory or number of devices that would do.
    """
    assert world_size >= 1 and batch_rows >= 1, f"nothing to plan: {world_size} ranks, {batch_rows} rows"
    cluster = describe_cluster(world_size, device) if cluster is None else replace(cluster, num_devices=world_size)
    staged = find_staged_nodes(split.rowwise, split.layouts, inputs)
    graph = BlockGraph(blocks=(), flows=(), parameters=())
    if staged.atoms:
        graph = build_block_graph(
            staged,
            inputs,
            split.outputs,
            needs_grad,
            device=cluster.device,
            rows=max(1, batch_rows // world_size),
            max_blocks=config.max_partition_num,
            pins=StagePins.from_config(config),
            keep_rows_outputs=config.outputs == "all",
        )
    if rows_symbol is not None:
        free = set().union(*(flow.num_bytes.free_symbols for flow in graph.flows), set())
        assert free <= {rows_symbol}, f"sizes depend on {free - {rows_symbol}}, not only on the batch size"
    return plan_blocks(
        graph,
        config,
        cluster=cluster,
        batch_rows=batch_rows,
        schedule=choose_schedule(split, needs_grad, config),
        fingerprint=fingerprint,
        model_name=model_name,
        stage_replicas=stage_replicas,
    )


def describe_cluster(world_size: int, device: torch.device | None = None) -> Cluster:
    """This machine's kind of device, `world_size` of them, by generic numbers; as many per node as this node has."""
    if device is None or device.type != "cuda":
        return local_cpu(world_size)
    properties = torch.cuda.get_device_properties(device)
    return generic_gpu(
        world_size,
        devices_per_node=max(1, min(world_size, torch.cuda.device_count())),
        device_name=str(properties.name),
        memory_bytes=int(properties.total_memory),
        num_multiprocessors=int(properties.multi_processor_count),
    )


def choose_schedule(
    split: BatchSplit, needs_grad: Collection[str], config: Config
) -> Literal["1f1b", "fill_drain"]:
    """1F1B where a loss inside of the model is linear in its sums over rows; else all forwards come first."""
    has_loss = any(output.kind == "partial" and output.name in needs_grad for output in split.outputs)
    possible = has_loss and split.linear
    if config.schedule == "1f1b" and not possible:
        why = "the loss is not a linear function of sums over samples" if has_loss else "the model returns no loss"
        logger.warning("schedule 1f1b is not possible (%s); fill_drain is used", why)
    return "1f1b" if possible and config.schedule != "fill_drain" else "fill_drain"


def plan_blocks(
    graph: BlockGraph,
    config: Config,
    *,
    cluster: Cluster,
    batch_rows: int,
    schedule: Literal["1f1b", "fill_drain"],
    fingerprint: str,
    model_name: str = "",
    stage_replicas: tuple[int, ...] | None = None,
) -> Plan:
    """`plan_stages` from the block graph on. Raises as it does."""
    request = _Request.of(graph, config, cluster, batch_rows, schedule, stage_replicas)
    if not graph.blocks:
        return _plan_without_blocks(request, config, fingerprint, model_name)
    costs = request.costs()
    problem = request.problem(costs)
    solution = search(problem)
    if solution is None:
        costs, problem, solution = _use_fewer_devices(request, problem)
    bounds = solution.bounds
    stages, first_rank = [], 0
    for index, replicas in enumerate(solution.replicas):
        begin, end = bounds[index], bounds[index + 1]
        predicted = costs.stage_cost(begin, end, replicas, solution.num_micro_batches, solution.num_stages - index)
        busy = solution.num_micro_batches * (predicted.forward_seconds + predicted.backward_seconds)
        idle = min(max(1 - busy / max(solution.step_seconds, 1e-30), 0.0), 1.0)
        predicted = StageCost(**{**predicted.model_dump(), "idle_share": idle})
        ranks, received = range(first_rank, first_rank + replicas), costs.bytes_per_row(begin, end)
        stages.append(
            _stage_plan(
                graph, index, range(begin, end), ranks, predicted, costs.row_costs(begin, end, replicas), received, config
            )
        )
        first_rank += replicas
    return Plan(
        schema_version=SCHEMA_VERSION,
        fingerprint=fingerprint,
        model_name=model_name,
        cluster=cluster.assumption(),
        world_size=cluster.num_devices,
        batch_rows=batch_rows,
        num_micro_batches=solution.num_micro_batches,
        schedule=schedule,
        memory_limit_bytes=int(request.memory_bytes),
        blocks=_block_plans(graph, batch_rows),
        stages=tuple(stages),
        predicted_step_seconds=solution.step_seconds,
        equal_split_seconds=None,
        proven_gap=0.0,
        costs_from="analytic",
        binding=_binding(problem, solution, stages),
        alternatives=_alternatives(problem, solution),
        what_if=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is asked for, with the settings that a small model or batch cannot meet lowered."""

    graph: BlockGraph
    cluster: Cluster
    batch_rows: int
    schedule: Literal["1f1b", "fill_drain"]
    micro_batches: tuple[int, ...]
    memory_bytes: float
    memory_margin: float
    optimizer_factor: float
    num_stages: int | None
    replicas: int | None
    stage_replicas: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        graph: BlockGraph,
        config: Config,
        cluster: Cluster,
        batch_rows: int,
        schedule: Literal["1f1b", "fill_drain"],
        stage_replicas: tuple[int, ...] | None,
    ) -> _Request:
        fixed = stage_replicas or config.stage_replica_counts or None
        num_stages = len(fixed) if fixed else config.partition_num or None
        num_devices, num_blocks = cluster.num_devices, len(graph.blocks)
        needed = sum(fixed) if fixed else (num_stages or 1) * (config.replica_num or 1)
        if needed > num_devices or (fixed and needed != num_devices):
            raise InfeasiblePlanError(
                f"{_forced_text(fixed, config)} needs {needed} ranks, and there are {num_devices}", smallest_num_devices=needed
            )
        if num_blocks and (num_stages or 1) > num_blocks:
            if fixed:
                raise InfeasiblePlanError(
                    f"stage_replicas asks for {num_stages} stages, and the model can be cut into {num_blocks} at most"
                )
            logger.warning("partition_num %d is too much: the model can be cut into %d stages at most", num_stages, num_blocks)
            num_stages = num_blocks
        smallest, largest = (
            (config.pipeline_num, config.pipeline_num) if config.pipeline_num else (config.min_pipeline, config.max_pipeline)
        )
        if smallest > batch_rows:
            logger.warning("%d micro-batches are too many for a batch of %d rows; %d are used", smallest, batch_rows, batch_rows)
        # Every replica gets a row of every micro-batch; steps with more rows may run more micro-batches than this one.
        most = max(1, batch_rows // max(fixed or (config.replica_num, 1)))
        limit = config.mem_limit_gb * BYTES_PER_GB or cluster.device.memory_bytes
        return cls(
            graph=graph,
            cluster=cluster,
            batch_rows=batch_rows,
            schedule=schedule,
            micro_batches=useful_micro_batches(batch_rows, min(smallest, most), min(largest, most)),
            memory_bytes=limit * (1 - config.mem_margin),
            memory_margin=config.mem_margin,
            optimizer_factor=config.opt_param_factor,
            num_stages=None if fixed else num_stages,
            replicas=None if fixed else config.replica_num or None,
            stage_replicas=fixed,
        )

    def costs(self, num_devices: int | None = None) -> StageCosts:
        cluster = self.cluster if num_devices is None else replace(self.cluster, num_devices=num_devices)
        if self.num_stages is not None or self.stage_replicas is not None:
            # The number of messages is given, and their latency runs beside the computing of other micro-batches: it must not
            # keep work away from the stages in the middle, which have the most neighbours.
            cluster = replace(
                cluster,
                intra_node=replace(cluster.intra_node, latency_seconds=0.0),
                inter_node=replace(cluster.inter_node, latency_seconds=0.0),
            )
        return StageCosts(
            graph=self.graph,
            cluster=cluster,
            batch_rows=self.batch_rows,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            optimizer_factor=self.optimizer_factor,
        )

    def problem(self, costs: StageCosts) -> SearchProblem:
        return costs.problem(
            self.memory_bytes, num_stages=self.num_stages, replicas=self.replicas, stage_replicas=self.stage_replicas
        )


def _forced_text(fixed: tuple[int, ...] | None, config: Config) -> str:
    if fixed:
        return f"stage_replicas {','.join(map(str, fixed))}"
    names = [name for name in ("partition_num", "replica_num") if getattr(config, name)]
    return " x ".join(f"{name} {getattr(config, name)}" for name in names)


def _use_fewer_devices(request: _Request, problem: SearchProblem) -> tuple[StageCosts, SearchProblem, Solution]:
    """When no plan uses every rank: the best of those that leave the fewest without work; an error if none fits at all."""
    usable = 0 if request.stage_replicas else most_devices(problem)
    if usable:
        costs = request.costs(usable)
        fewer = request.problem(costs)
        solution = search(fewer)
        if solution is not None:
            logger.warning(
                "only %d of %d ranks can be given work by the settings, the model's blocks (%d) and the batch (%d rows)",
                usable, problem.num_devices, problem.num_blocks, request.batch_rows,
            )  # fmt: skip
            return costs, fewer, solution
    memory = smallest_memory(problem)
    if memory is None:
        raise InfeasiblePlanError(
            f"{problem.num_devices} ranks cannot each get at least one row in the stages asked for: the batch has "
            f"{request.batch_rows} rows in {problem.micro_batches[0]} micro-batches or more"
        )
    raise InfeasiblePlanError(
        f"the smallest cut needs {_size(memory)} on one device, and plans may use {_size(request.memory_bytes)}",
        smallest_bytes=memory / (1 - request.memory_margin),
        smallest_num_devices=None if request.stage_replicas else _smallest_num_devices(request),
    )


def _smallest_num_devices(request: _Request) -> int | None:
    """Smallest number of devices, above the cluster's, with which a plan fits; None up to a limit."""

    def fits(count: int) -> bool:
        return is_feasible(request.problem(request.costs(count)))

    low = request.cluster.num_devices
    most = min(_MOST_DEVICES_SUGGESTED, len(request.graph.blocks) * request.batch_rows)
    high = low
    while not fits(high):
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _stage_plan(
    graph: BlockGraph,
    index: int,
    blocks: range,
    ranks: range,
    predicted: StageCost,
    at_rows: tuple[RowCost, ...],
    bytes_per_row: tuple[float, float],
    config: Config,
) -> StagePlan:
    own = [graph.blocks[block] for block in blocks]
    return StagePlan(
        index=index,
        blocks=tuple(blocks),
        nodes=tuple(name for block in own for name in block.nodes),
        modules=tuple(dict.fromkeys(path for block in own for path in block.modules)),
        parameters=tuple({name for block in own for name in block.parameters}),
        updated_buffers=tuple({name for block in own for name in block.updated_buffers}),
        ranks=tuple(ranks),
        recompute=1.0,
        predicted=predicted,
        at_rows=at_rows,
        received_bytes_per_row=bytes_per_row[0],
        gradient_bytes_per_row=bytes_per_row[1],
        num_buckets=max(1, math.ceil(predicted.gradient_bytes / (config.bucket_mb * 2**20))),
    )


def _block_plans(graph: BlockGraph, batch_rows: int) -> tuple[BlockPlan, ...]:
    sizes = {use.name: use.num_bytes for use in graph.parameters}
    plans = []
    for block in graph.blocks:
        amounts = [block.forward_flops, block.backward_flops, block.moved_bytes, block.saved_bytes]
        forward, backward, moved, saved = (int(value) for value in evaluate(amounts, [batch_rows])[:, 0])
        plans.append(
            BlockPlan(
                index=block.index,
                structure=block.structure,
                nodes=block.nodes,
                modules=block.modules,
                parameters=block.parameters,
                forward_flops=forward,
                backward_flops=backward,
                moved_bytes=moved,
                activation_bytes=saved,
                parameter_bytes=sum(sizes[name] for name in block.parameters),
            )
        )
    return tuple(plans)


def _binding(problem: SearchProblem, solution: Solution, stages: Sequence[StagePlan]) -> str:
    """What would have to change for a faster step: the slowest part of the slowest stage, and memory if it forced the plan."""
    worst = max(stages, key=lambda stage: _micro_batch_seconds(stage.predicted))
    cost = worst.predicted
    parts = {"compute": cost.forward_seconds + cost.backward_seconds, "transfers": cost.transfer_seconds}
    part = max(parts, key=lambda name: parts[name])
    total = max(solution.step_seconds, 1e-30)
    share = (solution.num_micro_batches + solution.num_stages - 1) * _micro_batch_seconds(cost) / total
    idle = (solution.num_stages - 1) / (solution.num_micro_batches + solution.num_stages - 1)
    reduce = max(stage.predicted.allreduce_seconds for stage in stages) / total
    part_share = parts[part] / max(_micro_batch_seconds(cost), 1e-30)
    text = (
        f"{part} of stage {worst.index} ({_percent(part_share)} of its time); step: micro-batches {_percent(share)}, "
        f"of which filling and draining {_percent(share * idle)}, all-reduce {_percent(reduce)}"
    )
    roomy = search(replace(problem, memory_bytes=float("inf")), below_seconds=solution.step_seconds)
    if roomy is not None:
        text = f"memory: with more of it the step would take {roomy.step_seconds:.4g} s; then {text}"
    return text


def _micro_batch_seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds + cost.transfer_seconds


def _size(num_bytes: float) -> str:
    return f"{num_bytes / BYTES_PER_GB:.3f} GB" if num_bytes >= BYTES_PER_GB / 10 else f"{num_bytes / 2**20:.3f} MB"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _alternatives(problem: SearchProblem, solution: Solution) -> tuple[Alternative, ...]:
    """The best plans with other numbers of stages: one, one less, one more, as many as devices."""
    if problem.stage_replicas is not None or problem.num_stages is not None:
        return ()
    most = min(problem.num_blocks, problem.num_devices)
    wanted = {1, solution.num_stages - 1, solution.num_stages + 1, most} - {0, solution.num_stages}
    return tuple(
        _alternative(replace(problem, num_stages=count), solution) for count in sorted(wanted) if count <= most
    )


def _alternative(problem: SearchProblem, chosen: Solution) -> Alternative:
    found = search(problem)
    count = problem.num_stages
    assert count is not None, "an alternative has a number of stages"
    if found is not None:
        longer = found.step_seconds / max(chosen.step_seconds, 1e-30)
        reason = f"its step takes {longer:.3g} times as long" if longer > 1 else "equally fast, with more stages or micro-batches"
        return Alternative(
            num_stages=count,
            stage_replicas=found.replicas,
            num_micro_batches=found.num_micro_batches,
            schedule=problem.schedule,
            recompute=(1.0,) * count,
            predicted_step_seconds=found.step_seconds,
            reason=reason,
        )
    unlimited = search(replace(problem, memory_bytes=float("inf")))
    if unlimited is None:
        reason = "its replicas would not each get a row"
        replicas, number = (1,) * count, problem.micro_batches[0]
    else:
        least = _size(memory_bytes(problem, unlimited))
        reason = f"it does not fit: its fastest cut needs {least} on one device, and plans may use {_size(problem.memory_bytes)}"
        replicas, number = unlimited.replicas, unlimited.num_micro_batches
    return Alternative(
        num_stages=count,
        stage_replicas=replicas,
        num_micro_batches=number,
        schedule=problem.schedule,
        recompute=(1.0,) * count,
        predicted_step_seconds=None,
        reason=reason,
    )


def _plan_without_blocks(request: _Request, config: Config, fingerprint: str, model_name: str) -> Plan:
    """A model that computes nothing from its batch: one stage without nodes on all ranks."""
    nothing = StageCost(**{name: 0 for name in StageCost.model_fields})
    at_rows = (RowCost(rows=1, **{name: 0 for name in RowCost.model_fields if name != "rows"}),)
    ranks = range(request.cluster.num_devices)
    stage = _stage_plan(request.graph, 0, range(0), ranks, nothing, at_rows, (0.0, 0.0), config)
    return Plan(
        schema_version=SCHEMA_VERSION,
        fingerprint=fingerprint,
        model_name=model_name,
        cluster=request.cluster.assumption(),
        world_size=request.cluster.num_devices,
        batch_rows=request.batch_rows,
        num_micro_batches=1,
        schedule=request.schedule,
        memory_limit_bytes=int(request.memory_bytes),
        blocks=(),
        stages=(stage,),
        predicted_step_seconds=0.0,
        equal_split_seconds=None,
        proven_gap=0.0,
        costs_from="analytic",
        binding="nothing: the model computes nothing from its batch",
        alternatives=(),
        what_if=(),
    )
