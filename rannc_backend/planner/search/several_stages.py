"""Plans in which a rank computes several stages.

In: a search problem, a plan of it in which each rank has one stage, a schedule for several. Out: a plan with as many times
more stages, on the same lanes: stage after stage gets the share of the computing that its lane's replicas can do, and of
the budgets of recompute those that are fastest within the memory of the lane. It is priced by simulating its programs.
There is no proof that no better one exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, Channel
from rannc_backend.planner.search.moves import honours
from rannc_backend.planner.search.problem import Floats, Pricer, SearchProblem, Solution, StageTerms
from rannc_backend.schedule.description import Lanes, Schedule
from rannc_backend.schedule.edges import chain_edges
from rannc_backend.schedule.list_run import fullest, held_by
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.orders import ScheduleName, order_on, schedule_named
from rannc_backend.schedule.simulator import StageSeconds, simulate


def several_stages(problem: SearchProblem, base: Solution, name: ScheduleName) -> Solution | None:
    """The plan with the lanes and micro-batches of `base`, each lane with as many stages as the schedule has; None where
    the blocks are too few, or nothing fits.
    """
    schedule = schedule_named(name)
    num_stages = schedule.stages_per_lane * base.num_stages
    if num_stages > problem.num_blocks or base.placement != "stage_major":
        return None
    lanes = schedule.lanes(num_stages)
    lane_of = {stage: number for number, lane in enumerate(lanes) for stage in lane}
    replicas = tuple(base.replicas[lane_of[stage]] for stage in range(num_stages))
    pricer = Pricer(problem, base.num_micro_batches, name, problem.num_blocks)
    bounds = _even_bounds(pricer, lanes, replicas)
    pinned = replace(
        problem,
        num_stages=None,
        replicas=None,
        stage_replicas=None,
        starts=problem.lane_starts,
        stage_of=problem.lane_stage_of,
    )
    if bounds is None or not honours(pinned, bounds, replicas):
        return None
    solution = replace(
        base,
        schedule=name,
        bounds=bounds,
        replicas=replicas,
        places=tuple(base.places[lane_of[stage]] for stage in range(num_stages)),
        budgets=(problem.budgets[0],) * num_stages,
        own_order="",
    )
    budgets = _budgets(pricer, solution, lanes)
    if budgets is None:
        return None
    solution = replace(solution, budgets=budgets)
    seconds = step_seconds(problem, solution, schedule)
    return replace(solution, step_seconds=seconds, base=base) if np.isfinite(seconds) else None


def stage_terms(problem: SearchProblem, solution: Solution) -> list[StageTerms]:
    """By stage the seconds of a plan whose ranks may have several stages, arrays of one element."""
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule, solution.longest_stage)
    options = np.searchsorted(pricer.tables.replicas, solution.replicas)
    result = []
    for stage, place in enumerate(_places(pricer, solution)):
        is_local = stage > 0 and solution.ranks(stage) == solution.ranks(stage - 1)
        terms = pricer.stage(
            solution.num_stages - stage,
            np.array([solution.bounds[stage]]),
            np.array([solution.bounds[stage + 1] - solution.bounds[stage]]),
            options[stage : stage + 1],
            np.array([solution.places[stage]]),
            before_options=options[stage - 1 : stage] if stage and not is_local else None,
            before_places=np.array([solution.places[stage - 1]]) if stage and not is_local else None,
            num_stages=solution.num_stages,
        )
        budget = problem.budgets.index(solution.budgets[stage])
        result.append(replace(terms, backward=pricer.tables.backward[(budget, *place)][None]))
    return result


def step_seconds(problem: SearchProblem, solution: Solution, schedule: Schedule) -> float:
    """Simulated seconds of a step of a plan whose ranks may have several stages, whatever that needs in memory."""
    number, num_stages = solution.num_micro_batches, solution.num_stages
    all_terms = stage_terms(problem, solution)
    columns = [[float(column[0]) for column in terms.columns()] for terms in all_terms]
    if not np.isfinite(columns).all():
        return float("inf")
    stages = [
        StageSeconds(
            forward=forward,
            backward=backward,
            weight=min(weight, backward),
            allreduce=allreduce,
            num_buckets=int(buckets),
        )
        for forward, backward, _, _, allreduce, buckets, weight in columns
    ]
    messages = {}
    for stage in range(1, num_stages):
        messages[Channel(stage - 1, stage, FORWARD_VALUES)] = columns[stage][2]
        messages[Channel(stage, stage - 1, GRADIENTS)] = columns[stage][3]
    order = order_on(schedule, schedule.lanes(num_stages), number)
    step = simulate(lower_lanes(order, chain_edges(num_stages), "train", number), stages, messages)
    work = sum(
        replicas * (seconds.forward + seconds.backward)
        for replicas, seconds in zip(solution.replicas, stages, strict=True)
    )
    bounds = np.array(solution.bounds)
    copying = problem.copying(bounds[:-1], np.diff(bounds))
    longest = max(copying[list(lane)].sum() for lane in schedule.lanes(num_stages))
    return max(step.makespan_seconds, number * work / problem.num_cores) + float(longest)


def _places(pricer: Pricer, solution: Solution) -> list[tuple[int, int, int]]:
    """By stage, where its costs are in the tables."""
    options = np.searchsorted(pricer.tables.replicas, solution.replicas).tolist()
    pairs = zip(solution.bounds, solution.bounds[1:], options, strict=False)
    return [(begin, end - begin - 1, option) for begin, end, option in pairs]


def _even_bounds(pricer: Pricer, lanes: Lanes, replicas: Sequence[int]) -> tuple[int, ...] | None:
    """Cuts that give each lane a share of the computing in proportion to its replicas, and each of its stages an equal part
    of that, as nearly as blocks allow, at least a block each; what a stage has too much or too little of, the later ones of
    its lane make good. Stages begin where they must.
    """
    problem, tables = pricer.problem, pricer.tables
    option = int(np.searchsorted(tables.replicas, min(replicas)))
    blocks = np.arange(problem.num_blocks)
    work: Floats = tables.forward[blocks, 0, option] + tables.backward[0, blocks, 0, option]
    if not np.isfinite(work).all():
        return None
    sums = np.concatenate([[0.0], np.cumsum(work)])
    lane_of = {stage: lane for lane in lanes for stage in lane}
    whole = sums[-1] / sum(replicas[lane[0]] for lane in lanes)
    done = dict.fromkeys(lanes, 0.0)
    cuts: list[int] = []
    wanted = 0.0
    for stage in range(len(replicas) - 1):
        lane = lane_of[stage]
        num_left = len(lane) - lane.index(stage)
        wanted += max(0.0, whole * replicas[stage] - done[lane]) / num_left
        cuts.append(int(np.abs(sums - wanted).argmin()))
        done[lane] += float(sums[cuts[-1]] - sums[cuts[-2] if len(cuts) > 1 else 0])
    for start in sorted(set(problem.lane_starts) - {0}):
        nearest = min(range(len(cuts)), key=lambda place: abs(cuts[place] - start), default=None)
        if nearest is None:
            return None
        cuts[nearest] = start
    bounds = [0, *cuts, problem.num_blocks]
    for place in range(1, len(bounds) - 1):
        bounds[place] = max(bounds[place], bounds[place - 1] + 1)
    for place in range(len(bounds) - 2, 0, -1):
        bounds[place] = min(bounds[place], bounds[place + 1] - 1)
    return tuple(bounds)


def fixed_parts(
    problem: SearchProblem, pricer: Pricer, solution: Solution, stage: int
) -> tuple[float, float]:
    """What a stage needs whatever is in flight, without its workspace, and that: bytes."""
    fixed, workspaces = _fixed_parts_of(problem, pricer, solution, stage)
    budget = problem.budgets.index(solution.budgets[stage])
    return float(fixed[budget]), float(workspaces[budget])


def _fixed_parts_of(
    problem: SearchProblem, pricer: Pricer, solution: Solution, stage: int
) -> tuple[Floats, Floats]:
    """The same of all budgets."""
    begin, length, option = place = _places(pricer, solution)[stage]
    fixed: Floats = pricer.tables.fixed_bytes[(slice(None), *place)]
    if problem.workspace is None:
        return fixed, np.zeros(len(fixed))
    replicas = int(pricer.tables.replicas[option])
    workspace = problem.workspace(solution.num_micro_batches, begin, begin + length + 1, replicas)
    return fixed - workspace, workspace


def _budgets(pricer: Pricer, solution: Solution, lanes: Lanes) -> tuple[float, ...] | None:
    """Of each stage, with which its lane fits into memory and is fastest; None where a lane does not fit."""
    problem, tables = pricer.problem, pricer.tables
    schedule = schedule_named(solution.schedule)
    places = _places(pricer, solution)
    chosen = [0.0] * solution.num_stages
    counts = held_by(schedule, solution.num_stages, solution.num_micro_batches)
    fixed, workspaces = zip(
        *(_fixed_parts_of(problem, pricer, solution, stage) for stage in range(solution.num_stages)),
        strict=True,
    )
    for lane, all_counts in zip(lanes, counts, strict=True):
        best, fastest = None, np.inf
        for budgets in itertools.product(range(len(problem.budgets)), repeat=len(lane)):
            parts = [(budget, *places[stage]) for budget, stage in zip(budgets, lane, strict=True)]
            seconds = sum(float(tables.backward[part]) for part in parts)
            if not seconds < fastest:
                continue
            flight = [float(tables.flight_bytes[part]) for part in parts]
            kept = [float(tables.kept_bytes[places[stage]]) for stage in lane]
            others = sum(float(fixed[stage][budget]) for budget, stage in zip(budgets, lane, strict=True))
            workspace = max(
                float(workspaces[stage][budget]) for budget, stage in zip(budgets, lane, strict=True)
            )
            if others + workspace + sum(fullest(all_counts, flight, kept)) <= problem.memory_bytes:
                best, fastest = budgets, seconds
        if best is None:
            return None
        for budget, stage in zip(best, lane, strict=True):
            chosen[stage] = problem.budgets[budget]
    return tuple(chosen)
