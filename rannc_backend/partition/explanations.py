"""Why a plan is what it is: what binds it, which others lost and by how much, what would change it.

In: a finished search, its solution, the request. Out: texts and records for the `Plan`. The alternatives and what-ifs come
from short searches without proof: no better plan of their kind was found, but one may exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rannc_backend.ir.plan import Alternative, StageCost, StagePlan, WhatIf
from rannc_backend.partition.feasibility import least_bytes_of_one_stage
from rannc_backend.partition.plan_parts import priced
from rannc_backend.partition.plan_request import PlanRequest, size_text
from rannc_backend.partition.search_problem import SearchProblem, Solution
from rannc_backend.partition.stage_bounds import Cell
from rannc_backend.partition.stage_search import StageSearch, search_shortly
from rannc_backend.schedule.orders import ScheduleName

_SAME = 1e-3  # relative difference of steps that are called equal


def binding(plan: Solution, stages: Sequence[StagePlan], what_if: Sequence[WhatIf], *, ended: bool) -> str:
    """What would have to change for a faster step: the slowest part of the slowest stage, and memory where it forced the plan."""
    worst = max(stages, key=lambda stage: _micro_batch_seconds(stage.predicted))
    cost = worst.predicted
    parts = {"compute": cost.forward_seconds + cost.backward_seconds, "transfers": cost.transfer_seconds}
    part = max(parts, key=lambda name: parts[name])
    ranks = sum(len(stage.ranks) for stage in stages)
    idle = sum(stage.predicted.idle_share * len(stage.ranks) for stage in stages) / ranks
    reduction = max(stage.predicted.allreduce_seconds for stage in stages) / max(plan.step_seconds, 1e-30)
    share = parts[part] / max(_micro_batch_seconds(cost), 1e-30)
    text = (
        f"{part} of stage {worst.index} ({_percent(share)} of its time); ranks compute nothing for {_percent(idle)} of the step "
        f"(filling, draining, waiting); the longest all-reduce is {_percent(reduction)} of it, most of it beside computing"
    )
    memory = next((other for other in what_if if other.change == MORE_MEMORY), None)
    if memory is not None and memory.predicted_step_seconds is not None:
        if memory.predicted_step_seconds < plan.step_seconds * (1 - _SAME):
            text = f"memory: with twice as much the step would take {memory.predicted_step_seconds:.4g} s; then {text}"
    return text if ended else f"the user's interruption of the search: this is the best plan until then; then {text}"


def alternatives(
    request: PlanRequest, found: StageSearch, problem: SearchProblem, chosen: Solution, equal: Solution | None
) -> tuple[Alternative, ...]:
    """Good plans with other numbers of stages, of pure data parallelism, with the other schedule, and of equal splits.

    `problem`: in which steps are priced; that of `found` may leave latency out.
    """
    counts = problem.stage_counts
    wanted = [1, chosen.num_stages - 1, chosen.num_stages + 1, min(2 * chosen.num_stages, counts[-1])]
    numbers = _few(problem.micro_batches, chosen.num_micro_batches)
    result = []

    def best(schedules: Sequence[ScheduleName], count: int) -> Solution | None:
        return found.best_of(Cell(schedule=name, num_micro_batches=m, num_stages=count) for name in schedules for m in numbers)

    for count in dict.fromkeys(number for number in wanted if number in counts and number != chosen.num_stages):
        if count == 1 and least_bytes_of_one_stage(problem) > problem.memory_bytes:
            result.append(_one_stage_does_not_fit(request, problem, chosen))
            continue
        label = "pure data parallelism" if count == 1 else f"{count} stages"
        other = best((chosen.schedule,), count)
        if other is not None:
            result.append(_lost(label, _in(problem, other), chosen))
    for schedule in problem.schedules:
        if schedule != chosen.schedule and (chosen.num_micro_batches > 1 or chosen.num_stages > 1):
            other = best((schedule,), chosen.num_stages)
            if other is not None:
                result.append(_lost(f"schedule {schedule}", _in(problem, other), chosen))
    if equal is not None and (equal.bounds, equal.replicas) != (chosen.bounds, chosen.replicas):
        result.append(_lost("equally many blocks and replicas in every stage", equal, chosen))
    return tuple(result)


MORE_MEMORY, FASTER_LINKS, MORE_DEVICES = "twice the memory per device", "twice the bandwidth of all links", "twice the devices"


def what_if(request: PlanRequest, problem: SearchProblem, chosen: Solution) -> tuple[WhatIf, ...]:
    """The best plans found if one thing were different."""
    cluster = problem.cluster
    fast = replace(
        cluster,
        intra_node=replace(cluster.intra_node, bytes_per_second=2 * cluster.intra_node.bytes_per_second),
        inter_node=replace(cluster.inter_node, bytes_per_second=2 * cluster.inter_node.bytes_per_second),
    )
    cases = [(MORE_MEMORY, replace(problem, memory_bytes=2 * problem.memory_bytes)), (FASTER_LINKS, replace(problem, cluster=fast))]
    few = tuple(sorted(_few(problem.micro_batches, chosen.num_micro_batches)))
    if request.stage_replicas is None:
        costs = request.costs(replace(cluster, num_devices=2 * cluster.num_devices), micro_batches=few)
        cases.append((MORE_DEVICES, request.problem(costs)))
    result = []
    now: Solution | None = chosen
    if problem.num_stages is not None or problem.stage_replicas is not None:
        # Then the chosen plan may be another than the fastest: a change must beat that one.
        now = _search_shortly(problem, few, chosen)
    for change, other in cases:
        best = _search_shortly(other, few, chosen)
        if best is not None and now is not None and best.step_seconds >= now.step_seconds * (1 - _SAME):
            best = chosen
        if best is not None:
            record = WhatIf(
                change=change, predicted_step_seconds=best.step_seconds, num_stages=best.num_stages, stage_replicas=best.replicas
            )
            result.append(record)
    return tuple(result)


def _search_shortly(problem: SearchProblem, numbers: tuple[int, ...], start: Solution) -> Solution | None:
    """A good plan with the schedule of `start` and one of these numbers of micro-batches."""
    return search_shortly(replace(problem, micro_batches=numbers, schedules=(start.schedule,)), start)


def _few(numbers: Sequence[int], chosen: int) -> tuple[int, ...]:
    """Numbers of micro-batches around the chosen one, that first, and the largest."""
    place = numbers.index(chosen)
    near = (numbers[place], numbers[max(place - 1, 0)], numbers[min(place + 1, len(numbers) - 1)], numbers[-1])
    return tuple(dict.fromkeys(near))


def _in(problem: SearchProblem, solution: Solution) -> Solution:
    return priced(problem, solution) or solution


def _lost(label: str, other: Solution, chosen: Solution) -> Alternative:
    longer = other.step_seconds / max(chosen.step_seconds, 1e-30)
    if longer > 1 + _SAME:
        reason = f"{label}: the step takes {longer:.4g} times as long"
    else:
        reason = f"{label}: equally fast"
    return Alternative(
        num_stages=other.num_stages,
        stage_replicas=other.replicas,
        num_micro_batches=other.num_micro_batches,
        schedule=other.schedule,
        recompute=other.budgets,
        predicted_step_seconds=other.step_seconds,
        reason=reason,
    )


def _one_stage_does_not_fit(request: PlanRequest, problem: SearchProblem, chosen: Solution) -> Alternative:
    least = least_bytes_of_one_stage(problem)
    if least == float("inf"):
        held = sum(use.num_bytes * (2 + request.optimizer_factor if use.trainable else 1) for use in request.graph.parameters)
        least = held
    reason = (
        f"pure data parallelism: it does not fit: it needs {size_text(least)} or more on one device, and plans may use "
        f"{size_text(problem.memory_bytes)}"
    )
    replicas = min(problem.num_devices, max(1, request.batch_rows))
    return Alternative(
        num_stages=1,
        stage_replicas=(replicas,),
        num_micro_batches=chosen.num_micro_batches,
        schedule=chosen.schedule,
        recompute=(1.0,),
        predicted_step_seconds=None,
        reason=reason,
    )


def _micro_batch_seconds(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds + cost.transfer_seconds


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
