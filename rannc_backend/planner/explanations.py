"""Which plans lost to the chosen one, and by how much.

In: a finished search, its solution, the request. Out: records for the `Plan`. The alternatives come from
short searches without
proof: no better plan of their kind was found, but one may exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rannc_backend.ir.plan import Alternative
from rannc_backend.planner.plan_parts import priced
from rannc_backend.planner.plan_request import PlanRequest, size_text
from rannc_backend.planner.search.bounds import Cell
from rannc_backend.planner.search.feasibility import least_bytes_of_one_stage
from rannc_backend.planner.search.problem import SearchProblem, Solution
from rannc_backend.planner.search.search import StageSearch
from rannc_backend.planner.settling import settle
from rannc_backend.schedule.orders import ScheduleName

SAME = 1e-3  # relative difference of steps that are called equal


def alternatives(
    request: PlanRequest, found: StageSearch, problem: SearchProblem, chosen: Solution, equal: Solution | None
) -> tuple[Alternative, ...]:
    """Good plans with other numbers of stages, of pure data parallelism, with the other schedule, and of
    equal splits.

    `problem`: in which steps are priced; that of `found` may leave latency out.
    """
    counts, searched = problem.stage_counts, chosen.base or chosen
    wanted = [1, searched.num_stages - 1, searched.num_stages + 1, min(2 * searched.num_stages, counts[-1])]
    numbers = few_numbers(problem.micro_batches, chosen.num_micro_batches)
    result = []

    def best(schedules: Sequence[ScheduleName], count: int) -> Solution | None:
        return found.best_of(
            Cell(schedule=name, num_micro_batches=m, num_stages=count) for name in schedules for m in numbers
        )

    for count in dict.fromkeys(
        number for number in wanted if number in counts and number != searched.num_stages
    ):
        if count == 1 and least_bytes_of_one_stage(problem) > problem.memory_bytes:
            result.append(_one_stage_does_not_fit(request, problem, chosen))
            continue
        label = "pure data parallelism" if count == 1 else f"{count} stages"
        other = best((searched.schedule,), count)
        if other is not None:
            result.append(_lost(label, _in(problem, other), chosen))
    for schedule in problem.schedules:
        if schedule != chosen.schedule and (chosen.num_micro_batches > 1 or chosen.num_stages > 1):
            other = best((schedule,), searched.num_stages)
            if other is not None:
                result.append(_lost(f"schedule {schedule}", _in(problem, other), chosen))
    if equal is not None and (equal.bounds, equal.replicas) != (chosen.bounds, chosen.replicas):
        result.append(_lost("equally many blocks and replicas in every stage", equal, chosen))
    return tuple(result)


def without_zero(undivided: SearchProblem, chosen: Solution) -> Alternative:
    """What is found if every replica updates all, beside a plan in which one does (ZeRO)."""
    label = "without ZeRO"
    start = chosen.base or chosen
    search = StageSearch(replace(undivided, schedules=(start.schedule,), lane_schedules=()))
    found = search.run_shortly(start)
    if found is None:
        return Alternative(
            num_stages=chosen.num_stages,
            stage_replicas=chosen.replicas,
            num_micro_batches=chosen.num_micro_batches,
            schedule=chosen.schedule,
            recompute=chosen.budgets,
            predicted_step_seconds=None,
            reason=f"{label}: nothing fits into {size_text(undivided.memory_bytes)}",
        )
    return _lost(label, settle(undivided, found, None), chosen)


def few_numbers(numbers: Sequence[int], chosen: int) -> tuple[int, ...]:
    """Numbers of micro-batches around the chosen one, that first, and the largest."""
    place = numbers.index(chosen)
    near = (
        numbers[place],
        numbers[max(place - 1, 0)],
        numbers[min(place + 1, len(numbers) - 1)],
        numbers[-1],
    )
    return tuple(dict.fromkeys(near))


def _in(problem: SearchProblem, solution: Solution) -> Solution:
    return priced(problem, solution) or solution


def _lost(label: str, other: Solution, chosen: Solution) -> Alternative:
    longer = other.step_seconds / max(chosen.step_seconds, 1e-30)
    if longer > 1 + SAME:
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
        held = sum(
            use.held_bytes(request.optimizer_factor, offload=request.offload)
            for use in request.graph.parameters
        )
        least = held
    reason = (
        f"pure data parallelism: it does not fit: it needs {size_text(least)} or more on one device, and "
        f"plans may use {size_text(problem.memory_bytes)}"
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
