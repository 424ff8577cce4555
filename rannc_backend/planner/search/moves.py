"""Small parts of the stage search: which cells there are, how a plan is made of indices, and which plans are
near to one.

In and out: the types of planner/search/problem.py and planner/search/bounds.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rannc_backend.planner.search.bounds import Cell, Shapes
from rannc_backend.planner.search.problem import Ints, Placement, Pricer, SearchProblem, Solution


def first_cells(shapes: Shapes, counts: Sequence[int]) -> list[tuple[float, Cell, float]]:
    """(bound, cell, round trip at least) of the cells of one schedule and number of micro-batches in which
    plans may fit.

    `counts`: numbers of stages, ascending.
    """
    pricer = shapes.pricer
    result = []
    for num_stages, (bound, path) in shapes.first_bounds(counts).items():
        cell = Cell(
            schedule=pricer.schedule, num_micro_batches=pricer.num_micro_batches, num_stages=num_stages
        )
        result.append((bound, cell, path))
    result += _replica_major_cells(shapes, counts)
    return [each for each in result if is_wanted(pricer.problem, each[1].placement, each[1].num_stages)]


def is_wanted(problem: SearchProblem, placement: Placement, num_stages: int) -> bool:
    """Whether a placement is the one that the user prefers, or the only one for so many stages."""
    preferred = problem.limits.placement
    if preferred == "replica_major":
        return placement == preferred or not _has_pipelines(problem, num_stages)
    return preferred == "auto" or placement == preferred


def _has_pipelines(problem: SearchProblem, num_stages: int) -> bool:
    """Whether pipelines of so many stages, and not stages, may have consecutive ranks, and are nearer together then."""
    per_node, num_devices = problem.cluster.devices_per_node, problem.num_devices
    fixed = {problem.replicas} if problem.stage_replicas is None else set(problem.stage_replicas)
    return (
        1 < per_node < num_devices
        and 2 <= num_stages <= num_devices // 2
        and not (per_node % num_stages and num_stages % per_node)
        and len(fixed) == 1
        and 1 not in fixed
    )


def _replica_major_cells(shapes: Shapes, counts: Sequence[int]) -> list[tuple[float, Cell, float]]:
    """Cells in which pipelines, not stages, have consecutive ranks; only where that brings neighbours
    together.
    """
    pricer, problem = shapes.pricer, shapes.pricer.problem
    counts = [num_stages for num_stages in counts if _has_pipelines(problem, num_stages)]
    if not counts:
        return []
    result = []
    paths = shapes.option_paths()
    for num_stages in counts:
        for option, replicas in enumerate(pricer.tables.replicas.tolist()):
            if replicas < 2 or replicas * num_stages > problem.num_devices or not np.isfinite(paths[option]):
                continue
            cell = Cell(
                schedule=pricer.schedule,
                num_micro_batches=pricer.num_micro_batches,
                num_stages=num_stages,
                placement="replica_major",
                option=option,
            )
            path = float(paths[option])
            bounds = [path, pricer.num_micro_batches * path / num_stages]
            bounds += [alpha * path + beta * path / num_stages for alpha, beta in cell.quick_weights()]
            result.append((max(bounds), cell, path))
    return result


def make_solution(
    pricer: Pricer, cell: Cell, cuts: Ints, options: Ints, places: Ints, *, step_seconds: float
) -> Solution:
    """The plan with these bounds [p + 1], options [p] and places [p]."""
    budgets = []
    for stage in range(cell.num_stages):
        index = (cuts[stage], cuts[stage + 1] - cuts[stage] - 1, options[stage])
        budgets.append(
            pricer.problem.budgets[int(pricer.backward(cell.num_stages - stage, index, cell.num_stages)[1])]
        )
    return Solution(
        schedule=cell.schedule,
        num_micro_batches=cell.num_micro_batches,
        placement=cell.placement,
        bounds=tuple(map(int, cuts)),
        replicas=tuple(int(pricer.tables.replicas[option]) for option in options),
        places=tuple(map(int, places)),
        budgets=tuple(budgets),
        step_seconds=step_seconds,
    )


def honours(
    problem: SearchProblem,
    bounds: Sequence[int],
    replicas: Sequence[int],
    placement: Placement = "stage_major",
) -> bool:
    """Whether cuts, replica counts and placement are what the user asked for."""
    if not is_wanted(problem, placement, len(replicas)):
        return False
    if problem.num_stages not in (None, len(replicas)) or problem.stage_replicas not in (
        None,
        tuple(replicas),
    ):
        return False
    if problem.replicas is not None and set(replicas) != {problem.replicas}:
        return False
    if problem.legal_starts and not set(bounds) <= {*problem.legal_starts, problem.num_blocks}:
        return False
    stage_of_block = np.searchsorted(np.asarray(bounds), np.arange(problem.num_blocks), side="right") - 1
    return set(problem.starts) <= {0, *bounds} and all(
        stage_of_block[block] == stage for block, stage in problem.stage_of
    )


def neighbours(pricer: Pricer, plan: Solution) -> tuple[Ints, Ints, Ints]:
    """Bounds, options and places of the plans in which one cut moves or one stage's replicas go to another,
    or both.
    """
    problem, replicas = pricer.problem, pricer.tables.replicas
    bounds = np.array(plan.bounds)
    options = np.searchsorted(replicas, plan.replicas)
    stages = len(options)
    moves: list[tuple[Ints, Ints]] = []
    for cut in range(1, stages):
        for step in (-2, -1, 1, 2):
            changed = bounds.copy()
            changed[cut] += step
            moves.append((changed, options))
    for first in range(stages):
        for step in (-1, 1):
            changed = options.copy()
            changed[first] += step
            moves.append((bounds, changed))
            for second in range(stages):
                if second != first and step == 1:
                    both = changed.copy()
                    both[second] -= 1
                    moves.append((bounds, both))
    for start in range(1, stages):
        for step in (-1, 1):
            shifted = bounds.copy()
            shifted[start:-1] += step
            moves.append((shifted, options))
    found: dict[tuple[int, ...], tuple[Ints, Ints, Ints]] = {}
    for cuts, chosen in moves:
        if (np.diff(cuts) < 1).any() or chosen.min() < 0 or chosen.max() >= len(replicas):
            continue
        counts = replicas[chosen]
        if counts.sum() > problem.num_devices or not honours(problem, cuts.tolist(), tuple(counts.tolist())):
            continue
        for places in {pack(counts.tolist(), 0), pack(counts.tolist(), problem.cluster.devices_per_node)}:
            if places[-1] + counts[-1] <= problem.num_devices:
                found[(*cuts.tolist(), *chosen.tolist(), *places)] = (cuts, chosen, np.array(places))
    if not found:
        empty = np.zeros((0, stages), dtype=np.int64)
        return np.zeros((0, stages + 1), dtype=np.int64), empty, empty
    parts = list(found.values())
    return (
        np.stack([part[0] for part in parts]),
        np.stack([part[1] for part in parts]),
        np.stack([part[2] for part in parts]),
    )


def pack(replicas: Sequence[int], per_node: int) -> tuple[int, ...]:
    """First ranks of stages that follow each other; with `per_node`, one that would then touch a node more
    begins a node.
    """
    places, free = [], 0
    for count in replicas:
        if per_node:
            aligned = -(-free // per_node) * per_node
            touched = (free + count - 1) // per_node - free // per_node
            if touched > (count - 1) // per_node:
                free = aligned
        places.append(free)
        free += count
    return tuple(places)
