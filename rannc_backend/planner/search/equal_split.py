"""What one gets without a search: stages of equally many blocks, or of equally much computing.

In: a search's pricers, with bounds. Out: the fastest plan with equally many blocks and replicas in every
stage, over all numbers of stages, replicas and micro-batches; and for given replicas the most even shares of
the computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rannc_backend.planner.search.bounds import Cell, Shapes
from rannc_backend.planner.search.moves import ROUNDED_DOWN, honours, make_solution, pack
from rannc_backend.planner.search.problem import (
    Floats,
    Ints,
    Placement,
    Pricer,
    SearchProblem,
    Solution,
    plans_step_seconds,
)
from rannc_backend.schedule.orders import ScheduleName

_EVENNESS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Plans with one schedule and number of micro-batches. `bounds`: by number of stages, a lower bound of
    their steps.

    `make_pricer(p, limit)` prices equal splits into p stages or more whose steps take less than `limit`
    seconds.
    """

    schedule: ScheduleName
    num_micro_batches: int
    bounds: Mapping[int, float]
    make_pricer: Callable[[int, float], Pricer]

    @property
    def lower_bound(self) -> float:
        """Of all of them; inf where none fits."""
        return min(self.bounds.values(), default=float("inf"))


def best_equal_split(problem: SearchProblem, candidates: Iterable[Candidate]) -> Solution | None:
    """The fastest of the equal splits that fit and are allowed; None if there is none.

    Where the number of blocks is no multiple of the number of stages, the first stages get one more. Pricers
    are made only where their bounds are below the best so far.
    """
    best: Solution | None = None
    candidates = [
        replace(candidate, bounds=_bounds_without_tables(problem, candidate)) for candidate in candidates
    ]
    for candidate in sorted(candidates, key=lambda item: item.lower_bound):
        limit = float("inf") if best is None else best.step_seconds
        if candidate.lower_bound >= limit:
            break
        counts = sorted(count for count, bound in candidate.bounds.items() if bound < limit)
        pricer = candidate.make_pricer(counts[0], limit)
        for bound, cell, cuts, option in sorted(
            _with_bounds(pricer, counts), key=lambda entry: (entry[0], entry[1].num_stages, entry[3])
        ):
            if best is not None and bound >= best.step_seconds:
                break
            replicas = (int(pricer.tables.replicas[option]),) * cell.num_stages
            if not honours(pricer.problem, cuts.tolist(), replicas, cell.placement):
                continue
            options, places = np.full(cell.num_stages, option), equal_places(pricer, cell, option)
            seconds = _step_seconds(pricer, cuts, options, places, cell.placement)
            if np.isfinite(seconds) and (best is None or seconds < best.step_seconds):
                best = make_solution(pricer, cell, cuts, options, places, step_seconds=seconds)
    return best


def _bounds_without_tables(problem: SearchProblem, candidate: Candidate) -> dict[int, float]:
    """`candidate.bounds`, raised to what the blocks of equal splits take on equally many replicas; without
    those that cannot fit.
    """
    if problem.work_floor is None:
        return dict(candidate.bounds)
    floor = problem.work_floor(candidate.num_micro_batches)
    bounds = {}
    for count, bound in candidate.bounds.items():
        cuts = equal_cuts(problem.num_blocks, count)
        works, held = floor.of_stages(cuts)
        replicas = min(problem.num_devices // count, floor.most_replicas)
        if not replicas or held > problem.memory_bytes:
            continue
        path, longest = float(works.sum()) / replicas, float(works.max()) / replicas
        cell = Cell(
            schedule=candidate.schedule, num_micro_batches=candidate.num_micro_batches, num_stages=count
        )
        if cell.described.splits_backward:
            path = 0.0  # the work holds for whole backwards
        weighted = [alpha * path + beta * longest for alpha, beta in cell.quick_weights()]
        bounds[count] = max(bound, ROUNDED_DOWN * max(path, candidate.num_micro_batches * longest, *weighted))
    return bounds


@lru_cache(maxsize=4096)
def equal_cuts(num_blocks: int, num_stages: int) -> Ints:
    """Bounds [stages + 1] of stages of equally many blocks; the first ones get one more where that does not
    come out even.
    """
    sizes = np.full(num_stages, num_blocks // num_stages) + (np.arange(num_stages) < num_blocks % num_stages)
    return np.concatenate([[0], np.cumsum(sizes)])


def _with_bounds(pricer: Pricer, counts: Sequence[int]) -> Iterator[tuple[float, Cell, Ints, int]]:
    """The equal splits into these numbers of stages, each with a lower bound of its step, its cell, cuts and
    option.
    """
    num_blocks, tables = pricer.problem.num_blocks, pricer.tables
    counts = [count for count in counts if -(-num_blocks // count) <= pricer.max_length]
    if not counts:
        return
    cuts = [equal_cuts(num_blocks, count) for count in counts]
    index = np.concatenate([cut[:-1] for cut in cuts]), np.concatenate([np.diff(cut) for cut in cuts]) - 1
    to_end = np.concatenate([np.arange(count, 0, -1) for count in counts])
    of = np.repeat(counts, counts)
    forward, backward = tables.forward[index], pricer.backward(to_end[:, None], index, of[:, None])[0]
    weight = pricer.later_part[index]
    begins = np.cumsum([0, *counts])
    for place, count in enumerate(counts):
        cell = Cell(schedule=pricer.schedule, num_micro_batches=pricer.num_micro_batches, num_stages=count)
        stages = slice(begins[place], begins[place + 1])
        bounds = _bounds(cell, forward[stages], backward[stages], weight[stages])
        possible = np.isfinite(bounds) & (tables.replicas * count <= pricer.problem.num_devices)
        for option in np.flatnonzero(possible).tolist():
            yield float(bounds[option]), cell, cuts[place], option


def _bounds(cell: Cell, forward: Floats, backward: Floats, weight: Floats) -> Floats:
    """[options] from seconds [stages, options], without messages and reductions."""
    if cell.num_micro_batches == 1 and not cell.described.splits_backward:
        return (forward + backward).sum(axis=0)
    return cell.described.bound_of_stages(cell.num_micro_batches, forward, backward, weight)


def even_shares(pricer: Pricer, plan: Solution, shapes: Shapes | None = None) -> Solution | None:
    """`plan` with cuts that make the stages' seconds as equal as they can be; None where that does not
    fit. `shapes`: of the pricer, where they are known.
    """
    cell = Cell(
        schedule=pricer.schedule,
        num_micro_batches=pricer.num_micro_batches,
        num_stages=plan.num_stages,
        placement=plan.placement,
    )
    shapes = shapes or Shapes(pricer)
    options = np.searchsorted(pricer.tables.replicas, plan.replicas)
    num_blocks = pricer.problem.num_blocks
    unit = shapes.unit
    least = np.full(num_blocks + 1, np.inf)
    least[num_blocks] = 0.0
    ways = []
    for k in range(1, plan.num_stages + 1):
        choices = shapes.choices(cell, k)
        choices = choices.keep(choices.options == options[plan.num_stages - k])
        # A high power of the seconds: the largest counts most, and of equal largest ones the next.
        sums = (choices.compute / unit) ** _EVENNESS + least[choices.ends]
        least, ends = np.full(num_blocks + 1, np.inf), np.full(num_blocks + 1, -1)
        for place in np.argsort(-sums, kind="stable"):
            least[choices.begins[place]], ends[choices.begins[place]] = sums[place], choices.ends[place]
        ways.append(ends)
    if not np.isfinite(least[0]):
        return None
    cuts = [0]
    for ends in reversed(ways):
        cuts.append(int(ends[cuts[-1]]))
    bounds, places = np.array(cuts), np.array(plan.places)
    seconds = _step_seconds(pricer, bounds, options, places, plan.placement)
    if not np.isfinite(seconds):
        return None
    return make_solution(pricer, cell, bounds, options, places, step_seconds=seconds)


def best_even_shares(shapes: Shapes, counts: Sequence[int]) -> Solution | None:
    """The fastest of the plans with even shares of the computing, so many stages, and equally many replicas of each (or
    those that are asked for) that are allowed; None if there is none.
    """
    pricer, problem = shapes.pricer, shapes.pricer.problem
    best: Solution | None = None
    for count in counts:
        equal = [(int(replicas),) * count for replicas in pricer.tables.replicas]
        for replicas in equal if problem.stage_replicas is None else [problem.stage_replicas]:
            if len(replicas) != count or sum(replicas) > problem.num_devices:
                continue
            plan = Solution(
                schedule=pricer.schedule,
                num_micro_batches=pricer.num_micro_batches,
                placement="stage_major",
                bounds=(),
                replicas=replicas,
                places=pack(replicas, 0),
                budgets=(),
                step_seconds=float("inf"),
            )
            even = even_shares(pricer, plan, shapes)
            if even is not None and honours(problem, even.bounds, replicas):
                best = even if best is None or even.step_seconds < best.step_seconds else best
    return best


def _step_seconds(pricer: Pricer, bounds: Ints, options: Ints, places: Ints, placement: Placement) -> float:
    """Of one plan; as `plans_step_seconds`."""
    return float(plans_step_seconds(pricer, bounds[None], options[None], places[None], placement)[0])


def equal_places(pricer: Pricer, cell: Cell, option: int) -> Ints:
    """Consecutive ranks for each stage."""
    return np.arange(cell.num_stages) * int(pricer.tables.replicas[option])
