"""Small parts of the stage search: which cells there are and which of them can be left out, how a plan is made of
indices, and which plans are near to one.

In and out: the types of planner/search/problem.py and planner/search/bounds.py.

Quick bounds take no table of costs: most numbers of micro-batches and stages end with them. They are of problems whose
costs are sums over blocks (which say so with a `WorkFloor`). Terms as in planner/search/bounds.py, with r_s replicas of
stage s, D devices, W the least work (the least sum of r c of any plan), f the largest share of W in one stage that fits
into memory. Since the sum of r_s is at most D:

    P >= W / (f D)             (Cauchy: P >= (sum of the roots of the works of stages)^2 / D, none of them above f W)
    P >= W - (D - p) max c     (P = sum of r c less sum of (r - 1) c)
    p >= 1 / f,   max c >= W / D

The step is at least m max c, P, and alpha P + beta max c for the quick weights of the cell. All of these hold for one
max c; the bound is the least over it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rannc_backend.planner.search.bounds import Cell, CellBounds, Shapes
from rannc_backend.planner.search.problem import Ints, Placement, Pricer, SearchProblem, Solution
from rannc_backend.schedule.orders import ScheduleName, schedule_named


def with_one_more(kept: Sequence[Solution], solution: Solution, most: int) -> list[Solution]:
    """The best `most` of these plans, ascending by their steps; of those that differ in schedule or places alone the faster one."""
    others = [each for each in kept if _shape_of(each) != _shape_of(solution)]
    same = [each for each in kept if _shape_of(each) == _shape_of(solution)]
    faster = min([*same, solution], key=lambda each: each.step_seconds)
    return sorted([*others, faster], key=lambda each: each.step_seconds)[:most]


def _shape_of(plan: Solution) -> tuple[object, ...]:
    return plan.num_micro_batches, plan.bounds, plan.replicas


def keep_most_recent(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add to a dictionary of the `most` values that were used last."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def drop(heap: list[Any], numbers: Collection[int]) -> None:
    """Take entries out of a heap by their numbers, which come second in them; order it again."""
    heap[:] = [entry for entry in heap if entry[1] not in numbers]
    heapq.heapify(heap)


def examine(heap: list[Any], like: Cell, narrowed: Callable[[Cell, float], CellBounds], limit: float) -> None:
    """Bounds of all cells of a heap that have these prices, which are made once for them; hopeless ones are dropped.

    Args:
        heap: of (bound, number, cell, path, bounds or None), as the search has it.
    """
    hopeless, room = set[int](), _BOUNDS_KEPT - sum(entry[4] is not None for entry in heap)
    # In an order that does not depend on what was dropped elsewhere.
    heap.sort(key=lambda entry: entry[:2])
    for index, (bound, number, cell, path, known) in enumerate(heap):
        is_like = (cell.schedule, cell.num_micro_batches) == (like.schedule, like.num_micro_batches)
        if not is_like or known is not None or bound >= limit:
            continue
        bounds = narrowed(cell, path)
        if bounds.lower_bound >= limit:
            hopeless.add(number)
            continue
        heap[index] = (max(bound, bounds.lower_bound), number, cell, path, bounds if room > 0 else None)
        room -= 1
    drop(heap, hopeless)


RunAll = Callable[[Callable[[Any, Any], Any], Any, Sequence[Any]], list[Any]]
"""Calls a function of a module with what is shared and each of some items, perhaps in several processes."""

_BOUNDS_KEPT = 64  # of cells that are still to be walked through: some megabytes each
_NUM_INTERVALS = 96  # of max c; between two ends the weaker end counts
_WIDEST = 4.0  # max c beyond so many times W / D is one interval
ROUNDED_DOWN = 1 - 1e-9  # of sums that are summed up otherwise than in tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a search may do. Widths: partial plans kept at once; `most_candidates`: partial plans
    looked at in all.

    A problem of at most `whole_size` blocks x devices is walked through whole.
    """

    narrow_width: int = 24
    num_narrow_cells: int = 8
    width: int = 512
    whole_size: int = 100
    most_candidates: int = 12_000_000

    def width_for(self, problem: SearchProblem) -> int:
        """Partial plans kept at once."""
        return 10**9 if problem.num_blocks * problem.num_devices <= self.whole_size else self.width


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


def in_problem(problem: SearchProblem, plan: Solution) -> tuple[Pricer, Cell, Ints] | None:
    """Prices, cell and options [p] of a plan of another problem with the same blocks; None where this one has no such plan."""
    key = (plan.schedule, plan.num_micro_batches)
    if (
        key[0] not in problem.schedules
        or key[1] not in problem.micro_batches
        or plan.num_stages not in problem.stage_counts
    ):
        return None
    pricer = Pricer(problem, key[1], key[0], plan.longest_stage)
    options = np.searchsorted(pricer.tables.replicas, plan.replicas)
    if (options >= len(pricer.tables.replicas)).any() or plan.bounds[-1] != problem.num_blocks:
        return None
    is_same = tuple(pricer.tables.replicas[options]) == plan.replicas
    fits = max(plan.ranks(stage)[-1] for stage in range(plan.num_stages)) < problem.num_devices
    if not (is_same and fits and honours(problem, plan.bounds, plan.replicas, plan.placement)):
        return None
    cell = Cell(
        schedule=key[0], num_micro_batches=key[1], num_stages=plan.num_stages, placement=plan.placement,
        option=int(options[0]) if plan.placement == "replica_major" else None,
    )  # fmt: skip
    return pricer, cell, options


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


def quick_bounds(problem: SearchProblem, schedule: ScheduleName, num_micro_batches: int) -> dict[int, float]:
    """Number of stages -> lower bound of the step, for those numbers in which anything may fit and the bubble may be
    small enough; 0 where nothing is known.
    """
    counts = np.array(problem.stage_counts, dtype=np.int64)
    counts = counts[counts <= problem.limits.most_stages(schedule_named(schedule), num_micro_batches)]
    if problem.work_floor is None or not len(counts):
        return dict.fromkeys(counts.tolist(), 0.0)
    floor = problem.work_floor(num_micro_batches)
    work, devices, number = float(floor.work.sum()), problem.num_devices, num_micro_batches
    share = floor.largest_share(problem.memory_bytes)
    if not share or not np.isfinite(work):
        return {}
    counts = counts[counts * share >= ROUNDED_DOWN]
    if work <= 0:
        return dict.fromkeys(counts.tolist(), 0.0)
    least = work / devices
    ends = np.append(least * np.geomspace(1.0, _WIDEST, _NUM_INTERVALS + 1), np.inf)
    low, high = ends[:-1], ends[1:]
    stages = counts[:, None].astype(float)
    with np.errstate(invalid="ignore"):
        path = np.where(stages >= devices, work, work - (devices - stages) * high)
    path = np.maximum(path, max(work / (share * devices), least))
    if schedule_named(schedule).splits_backward:
        path = np.zeros_like(path)  # the sums hold for whole backwards
    bounds = np.maximum(number * low[None, :], path)
    cell = Cell(schedule=schedule, num_micro_batches=number, num_stages=1)
    for row, count in enumerate(counts.tolist()):
        for alpha, beta in replace(cell, num_stages=count).quick_weights():
            bounds[row] = np.maximum(bounds[row], alpha * path[row] + beta * low)
    return dict(zip(counts.tolist(), (bounds.min(axis=1) * ROUNDED_DOWN).tolist(), strict=True))


def useful_micro_batches(batch_rows: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Numbers of micro-batches in [smallest, largest] worth trying: of those with equally large ones only the
    fewest.

    No more than the batch has rows.
    """
    chosen: dict[int, int] = {}
    for number in range(min(smallest, batch_rows), min(largest, batch_rows) + 1):
        chosen.setdefault(-(-batch_rows // number), number)
    return tuple(sorted(chosen.values()))


def by_number(
    run_all: RunAll, function: Callable[[Any, Any], Any], search: object, items: Sequence[Any]
) -> list[Any]:
    """`function(search, item)` of all items, which end in a number of micro-batches: those of one number share tables, so
    they are computed in one process. [] where there are not several numbers.
    """
    groups: dict[int, list[Any]] = {}
    for item in items:
        groups.setdefault(item[-1], []).append(item)
    if len(groups) < 2:
        return []
    results = run_all(_of_group, (function, search), list(groups.values()))
    found = dict(zip(groups, map(iter, results), strict=True))
    return [next(found[item[-1]]) for item in items]


def _of_group(shared: tuple[Callable[[Any, Any], Any], object], items: Sequence[Any]) -> list[Any]:
    function, search = shared
    return [function(search, item) for item in items]


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
