"""The parts of a `Plan` from a `Solution` and the costs that it was found with.

In: the block graph, `IntervalCosts`, the solution. Out: `StagePlan`s and `BlockPlan`s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rannc_backend.ir.block_graph import Block, BlockGraph
from rannc_backend.ir.plan import BlockPlan, RowCost, StageCost, StagePlan
from rannc_backend.ir.plan_formats import Formats
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import Interval, MemoryParts, StageMemory, WholeStages
from rannc_backend.planner.search.bounds import Cell
from rannc_backend.planner.search.feasibility import Cut
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.planner.search.moves import make_solution
from rannc_backend.planner.search.problem import (
    Pricer,
    SearchProblem,
    Solution,
    StageTerms,
    plans_step_seconds,
    plans_terms,
)
from rannc_backend.planner.search.several_stages import (
    counted_twice,
    fixed_parts,
    kept_by_budget,
    lane_costs,
    stage_terms,
    step_seconds,
)
from rannc_backend.report.words import size_text
from rannc_backend.schedule.chain import chains_step_seconds
from rannc_backend.schedule.description import Lanes, Schedule
from rannc_backend.schedule.list_run import limits_in_lane
from rannc_backend.schedule.list_scheduled import ListScheduled
from rannc_backend.schedule.lowering import waiting_bytes
from rannc_backend.schedule.orders import ScheduleName, held_bytes, schedule_named
from rannc_backend.schedule.plan_simulation import PipelineShape
from rannc_backend.schedule.simulator import StageSeconds
from rannc_backend.settings.options import Config

_WORTH_NAMING = 0.01  # share of a stage's memory
_MAX_NAMED = 3  # stages


def solution_terms(problem: SearchProblem, solution: Solution) -> list[StageTerms]:
    """By stage the seconds of a solution, arrays of one element."""
    if solution.has_several_stages:
        return stage_terms(problem, solution)
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule, solution.longest_stage)
    options = np.searchsorted(pricer.tables.replicas, solution.replicas)
    bounds, places = np.array([solution.bounds]), np.array([solution.places])
    return plans_terms(pricer, bounds, options[None], places, solution.placement)


def longest_compute(problem: SearchProblem, solution: Solution) -> float:
    """Seconds that the slowest stage computes for one micro-batch."""
    return max(float(terms.forward[0] + terms.backward[0]) for terms in solution_terms(problem, solution))


def priced(
    problem: SearchProblem, solution: Solution, *, schedule: ScheduleName | None = None
) -> Solution | None:
    """The same cuts and ranks, perhaps with another schedule, priced in another problem with the same tables;
    None if it does not fit.
    """
    if solution.has_several_stages:
        seconds = step_seconds(problem, solution, solution.described)
        return replace(solution, step_seconds=seconds, own_order="")
    schedule = schedule or solution.schedule
    pricer = Pricer(problem, solution.num_micro_batches, schedule, solution.longest_stage)
    options = np.searchsorted(pricer.tables.replicas, solution.replicas)
    known = np.minimum(options, len(pricer.tables.replicas) - 1)
    if (pricer.tables.replicas[known] != solution.replicas).any():
        return None  # not a replica count that is tried with these micro-batches
    cuts, places = np.array(solution.bounds), np.array(solution.places)
    seconds = float(
        plans_step_seconds(pricer, cuts[None], options[None], places[None], solution.placement)[0]
    )
    if not np.isfinite(seconds):
        return None
    cell = Cell(
        schedule=schedule,
        num_micro_batches=solution.num_micro_batches,
        num_stages=solution.num_stages,
        placement=solution.placement,
    )
    return make_solution(pricer, cell, cuts, options, places, step_seconds=seconds)


def own_order_of(problem: SearchProblem, solution: Solution) -> ListScheduled:
    """The schedule that is made for a solution, within the memory that its stages leave."""
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule, solution.longest_stage)
    tables, costs = pricer.tables, []
    lanes = solution.lanes
    limits = _limits(pricer, solution)
    for index, terms in enumerate(solution_terms(problem, solution)):
        option = int(np.searchsorted(tables.replicas, solution.replicas[index]))
        begin, end = solution.bounds[index], solution.bounds[index + 1]
        place = (begin, end - begin - 1, option)
        budget = problem.budgets.index(solution.budgets[index])
        costs.append(
            replace(
                lane_costs(terms),
                flight_bytes=float(tables.flight_bytes[(budget, *place)]),
                kept_bytes=kept_by_budget(pricer, solution, index)[budget],
                limit_bytes=limits[index],
                message_bytes=float(tables.message_bytes[place]),
                gradient_bytes=float(tables.gradient_bytes[place]),
            )
        )
    described = schedule_named(problem.own_order)
    assert isinstance(described, ListScheduled), f"{described} is made for no plan"
    return replace(described, costs=tuple(costs), lanes_of_plan=lanes)


def _limits(pricer: Pricer, solution: Solution) -> dict[int, float]:
    """By stage, what its micro-batches may hold: see `list_run.limits_in_lane`."""
    limits: dict[int, float] = {}
    sizes = fixed_parts(pricer, solution)
    for lane in solution.lanes:
        others, workspaces = zip(*(sizes[stage] for stage in lane), strict=True)
        limits |= zip(lane, limits_in_lane(pricer.problem.memory_bytes, others, workspaces), strict=True)
    return limits


def keeps_limits(problem: SearchProblem, solution: Solution) -> bool:
    """Whether a solution in its order keeps the limits of the problem."""
    if not problem.limits:
        return True
    return not problem.limits.broken_by(*judged(problem, solution))


def judged(problem: SearchProblem, solution: Solution) -> tuple[PipelineShape, Schedule, Lanes, int]:
    """What `PipelineLimits.broken_by` asks of a solution."""
    stages = [
        StageSeconds(
            forward=float(terms.forward[0]),
            backward=float(terms.backward[0]),
            weight=float(min(terms.weight[0], terms.backward[0])),
        )
        for terms in solution_terms(problem, solution)
    ]
    schedule = own_order_of(problem, solution) if solution.own_order else solution.described
    lanes, number = solution.lanes, solution.num_micro_batches
    shape = PipelineShape.of(schedule, lanes, number, stages, solution.replicas)
    return shape, schedule, lanes, number


def priced_in(problem: SearchProblem, solution: Solution, schedule: Schedule) -> float:
    """Simulated seconds of a step of a solution in another schedule, whatever that needs in memory."""
    if solution.has_several_stages:
        return step_seconds(problem, solution, schedule)
    columns = zip(*(terms.columns() for terms in solution_terms(problem, solution)), strict=True)
    *kept, weight, new_values = (np.stack(column, axis=1) for column in columns)
    number = solution.num_micro_batches
    chain = chains_step_seconds(*kept, num_micro_batches=number, schedule=schedule, weight=weight)
    work = (np.array(solution.replicas) * (kept[0] + kept[1])).sum()
    bounds = np.array(solution.bounds)
    copying = problem.copying(bounds[:-1], np.diff(bounds)).max()
    return float(max(chain[0], number * work / problem.num_cores) + new_values.max() + copying)


def stage_plans(
    graph: BlockGraph,
    costs: IntervalCosts,
    problem: SearchProblem,
    solution: Solution,
    whole_stages: WholeStages | None = None,
) -> tuple[StagePlan, ...]:
    """The stages of a solution; their memory from `whole_stages`, where that knows it."""
    terms = solution_terms(problem, solution)
    known: list[StageMemory | None] = [None] * solution.num_stages
    if whole_stages is not None:
        rows = [costs.replica_rows(solution.num_micro_batches, replicas) for replicas in solution.replicas]
        parts = zip(solution.bounds, solution.bounds[1:], solution.budgets, rows, strict=False)
        known = whole_stages.memory(
            [Interval(begin=b, end=e, budget=costs.traced_budget(x), rows=n) for b, e, x, n in parts]
        )
    memories = [
        _memory(costs, solution, index, flights, known[index])
        for index, flights in enumerate(_in_flight(solution))
    ]
    held = _held(costs, solution, memories)
    work = [float(each.forward[0] + each.backward[0]) for each in terms]
    busy = {
        stage: solution.num_micro_batches * sum(work[other] for other in lane)
        for lane in solution.lanes
        for stage in lane
    }
    return tuple(
        _stage(
            graph,
            costs,
            problem,
            solution,
            index,
            terms[index],
            (memories[index], held[index]),
            known[index],
            busy_seconds=busy[index],
        )
        for index in range(solution.num_stages)
    )


def _in_flight(solution: Solution) -> tuple[int, ...]:
    """By stage, the most micro-batches in flight."""
    return solution.described.in_flight_bounds(solution.num_stages, solution.num_micro_batches)


def _memory(
    costs: IntervalCosts, solution: Solution, index: int, num_in_flight: int, traced: StageMemory | None
) -> MemoryParts:
    begin, end = solution.bounds[index], solution.bounds[index + 1]
    own = costs.memory(
        begin,
        end,
        solution.budgets[index],
        solution.num_micro_batches,
        solution.replicas[index],
        num_in_flight=num_in_flight,
        traced=traced,
    )
    state, communicators = counted_twice(costs.shared, solution, index)
    return replace(
        own,
        optimizer=own.optimizer - state,
        elsewhere=own.elsewhere + state,
        messages=own.messages - communicators,
    )


def _held(costs: IntervalCosts, solution: Solution, memories: Sequence[MemoryParts]) -> tuple[float, ...]:
    """By stage, what it keeps of micro-batches, or what an optimizer's step needs in their place: at most, or where ranks
    have several, when they hold most, and messages that have come before they are used.
    """
    schedule, number, count = (
        solution.described,
        solution.num_micro_batches,
        solution.num_stages,
    )
    if solution.has_several_stages:
        flight, kept = [memory.activations for memory in memories], [memory.kept for memory in memories]
        held = held_bytes(schedule, count, number, flight, kept)
        messages = [
            costs.message_bytes(begin, end, [costs.replica_rows(number, replicas)], on_wire=True)
            for begin, end, replicas in zip(
                solution.bounds, solution.bounds[1:], solution.replicas, strict=False
            )
        ]
        values, gradients = ([float(sizes[part][0]) for sizes in messages] for part in range(2))
        waiting = zip(held, waiting_bytes(schedule, number, values, gradients), memories, strict=True)
        return tuple(max(one + other, memory.update) for one, other, memory in waiting)
    return tuple(
        max(
            flights * memory.activations
            + float(schedule.kept_memory(count - index, count, number, memory.kept, memory.activations)),
            memory.update,
        )
        for index, (flights, memory) in enumerate(zip(_in_flight(solution), memories, strict=True))
    )


def _stage(
    graph: BlockGraph,
    costs: IntervalCosts,
    problem: SearchProblem,
    solution: Solution,
    index: int,
    terms: StageTerms,
    holds: tuple[MemoryParts, float],
    traced: StageMemory | None,
    *,
    busy_seconds: float,
) -> StagePlan:
    begin, end = solution.bounds[index], solution.bounds[index + 1]
    number, replicas, budget = solution.num_micro_batches, solution.replicas[index], solution.budgets[index]
    memory, held = holds
    forward, backward, message, gradient, allreduce, buckets, weight, new_values = (
        float(column[0]) for column in terms.columns()
    )
    sizes = {
        "parameter_bytes": memory.parameters,
        "gradient_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activation_bytes": held,
        "buffer_bytes": memory.buffers,
        "workspace_bytes": memory.workspace,
    }
    whole = {name: math.ceil(size) for name, size in sizes.items()}
    predicted = StageCost(
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=min(weight, backward),
        transfer_seconds=message + gradient,
        allreduce_seconds=allreduce,
        new_values_seconds=new_values,
        **whole,
        peak_bytes=sum(whole.values()),
        update_bytes=math.ceil(memory.update),
        elsewhere_bytes=math.floor(memory.elsewhere),
        idle_share=max(0.0, 1 - busy_seconds / solution.step_seconds) if solution.step_seconds > 0 else 0.0,
        offload_seconds=float(problem.copying(np.array(begin), np.array(end - begin))),
        host_bytes=math.ceil(memory.host),
    )
    rows = costs.replica_rows(number, replicas)
    received, returned = costs.message_bytes(begin, end, [rows], on_wire=True)
    is_first = index == 0
    return describe_stage(
        graph,
        index,
        range(begin, end),
        ranks=solution.ranks(index),
        recompute=budget,
        predicted=predicted,
        at_rows=_at_rows(costs, begin, end, replicas, budget, traced),
        bytes_per_row=(0.0, 0.0) if is_first else (float(received[0]) / rows, float(returned[0]) / rows),
        num_buckets=int(buckets),
    )


def fullest_stages(costs: IntervalCosts, cut: Cut, limit_bytes: float) -> str:
    """In words: the stages that need most, of those that need more than there is, by kind of memory."""
    num_stages = len(cut.replicas)
    found = []
    for index, (begin, end) in enumerate(pairwise(cut.bounds)):
        flights = schedule_named(cut.schedule).in_flight(num_stages - index, cut.num_micro_batches)
        kinds = min(
            (_memory_by_kind(costs, cut, index, budget, flights) for budget in costs.budgets),
            key=lambda kinds: sum(kinds.values()),
        )
        total = sum(kinds.values())
        if total > limit_bytes:
            ordered = sorted(kinds.items(), key=lambda item: -item[1])
            parts = [f"{kind} {size_text(size)}" for kind, size in ordered if size > _WORTH_NAMING * total]
            modules = [path for block in costs.graph.blocks[begin:end] for path in block.modules]
            place = f" ({' ... '.join(dict.fromkeys((modules[0], modules[-1])))})" if modules else ""
            found.append((total, f"stage {index} of {num_stages}{place}: {', '.join(parts)}"))
    found.sort(key=lambda item: -item[0])
    return "; ".join(text for _, text in found[:_MAX_NAMED])


def _memory_by_kind(
    costs: IntervalCosts, cut: Cut, index: int, budget: float, num_in_flight: int
) -> dict[str, float]:
    begin, end, number = cut.bounds[index], cut.bounds[index + 1], cut.num_micro_batches
    replicas = cut.replicas[index]
    memory = costs.memory(begin, end, budget, number, replicas, num_in_flight=num_in_flight)
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": max(num_in_flight * memory.activations, memory.update),
        "outputs": memory.outputs,
        "messages": memory.messages,
        "workspace": memory.workspace,
    }


def _at_rows(
    costs: IntervalCosts, begin: int, end: int, replicas: int, budget: float, traced: StageMemory | None
) -> tuple[RowCost, ...]:
    """What one micro-batch costs at every number of rows that some number of micro-batches gives a
    replica.
    """
    usable = [number for number in costs.micro_batches if replicas <= costs.batch_rows // number]
    rows = sorted({costs.replica_rows(number, replicas) for number in usable or costs.micro_batches[:1]})
    prices, (received, _) = (
        costs.prices(begin, end, budget, rows, traced),
        costs.message_bytes(begin, end, rows),
    )
    entries = []
    for place, count in enumerate(rows):
        if np.isfinite(prices.forward_seconds[place]) and np.isfinite(prices.backward_seconds[place]):
            entries.append(
                RowCost(
                    rows=count,
                    forward_seconds=float(prices.forward_seconds[place]),
                    backward_seconds=float(prices.backward_seconds[place]),
                    weight_seconds=float(min(prices.weight_seconds[place], prices.backward_seconds[place])),
                    kept_bytes=math.ceil(prices.kept_bytes[place]),
                    activation_bytes=math.ceil(prices.saved_bytes[place] + received[place]),
                    workspace_bytes=math.ceil(prices.workspace_bytes[place]),
                )
            )
    return tuple(entries)


def describe_stage(
    graph: BlockGraph,
    index: int,
    blocks: range,
    *,
    ranks: Sequence[int],
    recompute: float,
    predicted: StageCost,
    at_rows: tuple[RowCost, ...],
    bytes_per_row: tuple[float, float],
    num_buckets: int,
) -> StagePlan:
    """A stage with the nodes, modules and parameters of its blocks."""
    own = [graph.blocks[block] for block in blocks]
    return StagePlan(
        index=index,
        blocks=tuple(blocks),
        nodes=tuple(name for block in own for name in block.nodes),
        modules=tuple(dict.fromkeys(path for block in own for path in block.modules)),
        parameters=tuple({name for block in own for name in block.parameters}),
        updated_buffers=tuple({name for block in own for name in block.updated_buffers}),
        ranks=tuple(ranks),
        recompute=recompute,
        predicted=predicted,
        at_rows=at_rows,
        received_bytes_per_row=bytes_per_row[0],
        gradient_bytes_per_row=bytes_per_row[1],
        num_buckets=num_buckets,
    )


def block_plans(graph: BlockGraph, segments: Sequence[int], batch_rows: int) -> tuple[BlockPlan, ...]:
    """All blocks, with amounts of the whole batch."""
    sizes = {use.name: use.num_bytes for use in graph.parameters}
    plans = []
    known: dict[str, tuple[int, int, int, int]] = {}
    for block in graph.blocks:
        if block.structure not in known:
            known[block.structure] = _amounts(block, batch_rows)
        forward, backward, moved, saved = known[block.structure]
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
                segment=segments[block.index],
            )
        )
    return tuple(plans)


def _amounts(block: Block, rows: int) -> tuple[int, int, int, int]:
    """Forward FLOPs, backward FLOPs, bytes moved, bytes saved."""
    names = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")
    sums = [
        float(evaluate([getattr(item, name) for item in block.operators], [rows]).sum()) for name in names
    ]
    return (
        int(sums[0]),
        int(sums[1]),
        int(sums[2] + sums[3]),
        int(evaluate([block.saved_bytes], [rows])[0, 0]),
    )


def described_formats(
    graph: BlockGraph, stages: Sequence[tuple[range, Sequence[int]]], config: Config
) -> Formats:
    """What a plan with these stages, blocks and ranks of each, says of its formats, but for what they save."""
    number, in_rows, dense = 0, 0.0, 0.0
    for use in graph.parameters:
        if not use.is_in_rows:
            continue
        owners = {
            rank
            for blocks, ranks in stages
            if any(use.name in graph.blocks[block].parameters for block in blocks)
            for rank in ranks
        }
        number += 1
        if len(owners) > 1:
            in_rows += use.reduced_bytes * len(owners)
            dense += use.dense_sum_bytes * use.sum_share * len(owners)
    return Formats(
        boundary_dtype=config.boundary_dtype,
        gradient_dtype=config.gradient_dtype,
        num_row_gradients=number,
        row_gradient_bytes=int(in_rows),
        dense_gradient_bytes=int(dense),
    )
