"""The stage search: the plan with the shortest simulated step, over everything a `SearchProblem` leaves open.

In: a `SearchProblem`. Out: a `SearchResult`: the best plan found and a proven lower bound of every plan's step. Pure and
deterministic: work is limited by numbers of candidates, never by time.

Method. Branch and bound over cells (schedule, micro-batches, number of stages, placement). Most are dropped by bounds that
take no table of costs (`quick_bounds`); each of the others has a lower bound from shortest paths (bounds.py). First a narrow
walk (beam.py) through the most promising cells and local improvement give a plan; then cells are opened in the order of their
bounds: stages that no faster plan has are dropped, what is left is walked through unless another cell looks better by then,
and complete plans are simulated, until no cell's bound is below the best plan. A cell that is too wide to be walked through
whole keeps the least bound of what was left out. Problems of ten blocks on six devices always end proven.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rannc_backend.log.progress import Progress
from rannc_backend.planner.search.beam import Beam
from rannc_backend.planner.search.bounds import Cell, CellBounds, Shapes
from rannc_backend.planner.search.equal_split import Candidate, best_equal_split, best_even_shares
from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.moves import (
    Effort,
    RunAll,
    by_number,
    drop,
    examine,
    first_cells,
    in_problem,
    keep_most_recent,
    make_solution,
    neighbours,
    quick_bounds,
    with_one_more,
)
from rannc_backend.planner.search.problem import (
    Floats,
    Ints,
    Pricer,
    SearchProblem,
    Solution,
    plans_lower_bounds,
    plans_step_seconds,
)
from rannc_backend.planner.search.search_log import SearchLog
from rannc_backend.schedule.orders import ScheduleName

logger = logging.getLogger(__name__)

TOLERANCE = 1e-9  # relative: plans that are less faster than this count as equally fast
_SIMULATED_AT_ONCE = 2_000_000  # chains x stages x micro-batches: bounds memory
_MAX_IMPROVEMENTS = 30
_PRICERS_KEPT = 48  # they and choices of stages take memory, some gigabytes on a thousand devices
_SHAPES_KEPT = 3
_MAX_EVEN_SHARES = 4  # numbers of micro-batches of each schedule, and of stages, whose even shares are tried
_SLOWER_AT_MOST = 3.0  # plans of other shapes that are slower than so many times the best are of no interest

# lower bound, number, cell, its round trip at least, bounds if known
Entry = tuple[float, int, Cell, float, CellBounds | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`solution`: None if nothing fits. No plan's step is shorter than `lower_bound` seconds. `ended`: not by
    the user.
    """

    solution: Solution | None
    lower_bound: float
    num_candidates: int
    ended: bool = True

    @property
    def proven_gap(self) -> float:
        """Share of the step by which an unexplored plan could be faster."""
        if self.solution is None or self.solution.step_seconds <= 0:
            return 0.0
        gap = 1 - self.lower_bound / self.solution.step_seconds
        return min(gap, 1.0) if gap > 2 * TOLERANCE else 0.0


def search(
    problem: SearchProblem,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The fastest plan. When the user cancels, the best plan found so far; the first one is always waited for."""
    return StageSearch(problem, effort or Effort(), progress).run()


@dataclass(slots=True, eq=False)
class StageSearch:
    """One search, which can be asked afterwards for the best plans of other shapes. `seconds`: of the best plan, and before
    one is found, what plans must take less than. `run_all`: None: all is done here. `kept`: the
    `num_plans` best plans that differ in more than schedule and places, the best first.
    """

    problem: SearchProblem
    effort: Effort = Effort()
    progress: Progress | None = None
    pricers: dict[tuple[str, int], Pricer] = field(init=False, default_factory=dict)
    shapes: dict[tuple[str, int], Shapes] = field(init=False, default_factory=dict)
    best: Solution | None = field(init=False, default=None)
    seconds: float = float("inf")
    num_candidates: int = field(init=False, default=0)
    left_out: float = field(init=False, default=float("inf"))
    equal: Solution | None = field(init=False, default=None)  # the best equal split
    entries: list[Entry] = field(init=False, default_factory=list)
    interrupted: bool = field(init=False, default=False)
    log: SearchLog = field(init=False, default_factory=lambda: SearchLog(logger))
    run_all: RunAll | None = None
    num_plans: int = 1
    kept: list[Solution] = field(init=False, default_factory=list)

    def run_shortly(self, start: Solution) -> Solution | None:
        """A good plan without proof: the better of `start` and the equal splits, improved, and what narrow
        walks near it find.

        `start`: a plan of another problem with the same blocks, which may fit here. None if nothing fits.
        """
        self._try_again(start)
        self._try_equal_splits(self._candidates())
        if self.best is None:
            return self.run().solution
        self._improve()
        best = self.best
        for count in dict.fromkeys(
            (best.num_stages - 1, best.num_stages, best.num_stages + 1, 2 * best.num_stages)
        ):
            if count in self.problem.stage_counts:
                self._walk_narrowly(
                    Cell(schedule=best.schedule, num_micro_batches=best.num_micro_batches, num_stages=count)
                )
        if self.best is not best:
            self._improve()
        return self.best

    def run(self) -> SearchResult:
        """Search; see `search`."""
        heap = self._first_cells()
        if self.best is not None:
            self._improve()
        ended = self._walk(heap) and not self.interrupted
        self.log.report((entry[0], entry[2]) for entry in self.entries)
        lower = min(self.left_out, self.seconds, heap[0][0] if heap else self.seconds)
        return SearchResult(
            solution=self.best, lower_bound=lower, num_candidates=self.num_candidates, ended=ended
        )

    @property
    def limit(self) -> float:
        """Bounds from here on are of no interest: those of the last plan that is kept, when there are so many."""
        if self.num_plans == 1:
            return self.seconds * (1 - TOLERANCE)
        is_full = len(self.kept) == self.num_plans
        return self.kept[-1].step_seconds * (1 - TOLERANCE) if is_full else float("inf")

    def _keep(self, solution: Solution) -> None:
        """One more of the best plans; the first of equally fast ones stays the best."""
        self.kept = with_one_more(self.kept, solution, self.num_plans)
        self.best, self.seconds = self.kept[0], min(self.seconds, self.kept[0].step_seconds)

    def _cancelled(self) -> bool:
        return self._has_limit and self.progress is not None and self.progress.cancelled()

    @property
    def _has_limit(self) -> bool:
        """Whether a plan was found, or plans are known to be of no interest."""
        return bool(np.isfinite(self.seconds))

    def _candidates(self) -> list[Candidate]:
        """Of all schedules and numbers of micro-batches, with quick bounds."""
        pairs = itertools.product(self.problem.schedules, self.problem.micro_batches)
        return [
            self._candidate(schedule, number, quick_bounds(self.problem, schedule, number))
            for schedule, number in pairs
        ]

    def _candidate(self, schedule: ScheduleName, number: int, bounds: Mapping[int, float]) -> Candidate:
        make_pricer = partial(self._pricer_of_equal, schedule, number)
        return Candidate(schedule=schedule, num_micro_batches=number, bounds=bounds, make_pricer=make_pricer)

    def _try_equal_splits(self, candidates: Iterable[Candidate]) -> None:
        self.equal = equal = best_equal_split(self.problem, candidates)
        if equal is not None:
            self.log.priced(equal.num_stages, equal.step_seconds)
            if equal.step_seconds < self.limit:
                self._keep(equal)

    def _try_even_shares(self, candidates: Sequence[Candidate]) -> None:
        """Where no equal split keeps the limits: even shares of few stages, in the most promising numbers of micro-batches
        and the largest, with which stages idle least.
        """
        if self.best is not None or not self.problem.limits:
            return
        by_bound = sorted(candidates, key=lambda item: item.lower_bound)
        by_number = sorted(candidates, key=lambda item: -item.num_micro_batches)
        most = _MAX_EVEN_SHARES * len(self.problem.schedules)
        for candidate in {id(item): item for item in [*by_bound[:most], *by_number[:most]]}.values():
            if candidate.lower_bound >= self.limit:
                continue
            shapes = Shapes(self._pricer(candidate.schedule, candidate.num_micro_batches))
            found = best_even_shares(shapes, sorted(candidate.bounds)[:_MAX_EVEN_SHARES])
            if found is not None and found.step_seconds < self.limit:
                self._keep(found)

    def _first_cells(self) -> list[Entry]:
        """All cells that may hold a faster plan than the first found, as a heap."""
        entries = self.entries
        candidates = self._candidates()
        self._try_equal_splits(candidates)
        self._try_even_shares(candidates)
        if self.best is not None:
            self._improve()
        ordered = sorted(candidates, key=lambda item: item.lower_bound)
        # Without a plan, what is found in one may bound the next.
        for group in [ordered] if self._has_limit else [[candidate] for candidate in ordered]:
            for candidate, found in zip(group, self._cells_of(group), strict=True):
                if found is None:
                    self.left_out = min(self.left_out, candidate.lower_bound)
                    continue
                entries += [
                    (bound, len(entries) + index, cell, path, None)
                    for index, (bound, cell, path) in enumerate(found)
                ]
            self.interrupted = self.interrupted or self._cancelled()
            if not self._has_limit:
                self._try_narrowly(entries, self.effort.num_narrow_cells // 2)
        self._try_narrowly(entries, self.effort.num_narrow_cells)
        heap = [entry for entry in entries if entry[0] < self.limit]
        heapq.heapify(heap)
        return heap

    def _open_counts(self, candidate: Candidate) -> list[int]:
        """Numbers of stages with which the candidate may have a plan that is faster than the best."""
        return [count for count, bound in candidate.bounds.items() if bound < self.limit]

    def _cells_of(self, candidates: Sequence[Candidate]) -> list[list[tuple[float, Cell, float]] | None]:
        """By candidate: its cells, each with a bound and its round trip at least; None where it is left
        out.
        """
        items = [
            (each.schedule, self._open_counts(each), each.num_micro_batches)
            for each in candidates
            if each.lower_bound < self.limit
        ]
        found = iter(self._elsewhere(_cells_of_item, items))
        result: list[list[tuple[float, Cell, float]] | None] = []
        for candidate in candidates:
            self.interrupted = self.interrupted or self._cancelled()
            if candidate.lower_bound >= self.limit or self.interrupted:
                result.append(None)
                continue
            schedule, number = candidate.schedule, candidate.num_micro_batches
            cells = next(found, None)
            result.append(
                self.cells_with(schedule, self._open_counts(candidate), number) if cells is None else cells
            )
        return result

    def cells_with(
        self, schedule: ScheduleName, counts: Sequence[int], number: int
    ) -> list[tuple[float, Cell, float]]:
        """The cells with a schedule, a number of micro-batches and these numbers of stages; see `_cells_of`."""
        shapes = self._shapes_of(schedule, number)
        # Cores that are shared have all of the work to do.
        floor = number * shapes.least_path * self.problem.num_devices / self.problem.num_cores
        return [(max(bound, floor), cell, path) for bound, cell, path in first_cells(shapes, counts)]

    def _elsewhere(self, function: Callable[[StageSearch, Any], Any], items: Sequence[Any]) -> list[Any]:
        """See `by_number`: at the limit of now."""
        if self.run_all is None or not self._has_limit or self.num_plans > 1 or self._cancelled():
            return []
        other = StageSearch(self.problem, self.effort, seconds=self.seconds)
        return by_number(self.run_all, function, other, items)

    def best_of(self, cells: Iterable[Cell]) -> Solution | None:
        """A good plan of these cells, without proof; None if none takes less than a few times the best. After `run`."""
        other = StageSearch(self.problem, self.effort)
        other.pricers, other.seconds = self.pricers.copy(), _SLOWER_AT_MOST * self.seconds
        cells = list(cells)
        # A plan to begin from leaves few choices of stages.
        other._try_equal_splits(
            [
                other._candidate(cell.schedule, cell.num_micro_batches, {cell.num_stages: 0.0})
                for cell in cells
            ]
        )
        if other.best is not None:
            other._improve()
        for cell in cells:
            other._walk_narrowly(cell)
        return other.best

    def under(self, limits: PipelineLimits) -> StageSearch:
        """This search, asked from now on for plans that keep the limits."""
        if self.problem.limits == limits:
            return self
        other = StageSearch(replace(self.problem, limits=limits), self.effort, self.progress)
        other.best, other.seconds, other.equal, other.kept = self.best, self.seconds, self.equal, self.kept
        return other

    def _walk_narrowly(self, cell: Cell) -> None:
        """Look for a plan faster than the best in a cell of which nothing is known."""
        unit = self._shapes_of(cell.schedule, cell.num_micro_batches).unit
        self._walk_through(self._bounds(cell, unit * cell.num_stages, 0.0), self.effort.narrow_width)

    def _shapes_of(self, schedule: ScheduleName, num_micro_batches: int) -> Shapes:
        key = (schedule, num_micro_batches)
        known = self.shapes.get(key)
        # Of one limit, so that bounds do not depend on what was looked at before.
        if known is None or known.limit != self.limit:
            known = Shapes(self._pricer(*key), self.limit)
        keep_most_recent(self.shapes, key, known, _SHAPES_KEPT)
        return known

    def _pricer(
        self, schedule: ScheduleName, num_micro_batches: int, longest_stage: int | None = None
    ) -> Pricer:
        """Prices of stages of up to so many blocks; None: of all that plans faster than the best may have."""
        key = (schedule, num_micro_batches)
        needed = longest_stage or self.problem.longest_stage(num_micro_batches, self.limit)
        known = self.pricers.get(key)
        if known is None or known.max_length < min(needed, known.problem.own_gradient_bytes.shape[1]):
            known = Pricer(self.problem, num_micro_batches, schedule, needed)
        keep_most_recent(self.pricers, key, known, _PRICERS_KEPT)
        return known

    def _pricer_of_equal(
        self, schedule: ScheduleName, num_micro_batches: int, num_stages: int, limit: float
    ) -> Pricer:
        """For equal splits into at least so many stages, and where there is a limit for all plans below it."""
        longest = self.problem.longest_stage(num_micro_batches, limit) if np.isfinite(limit) else 1
        return self._pricer(
            schedule, num_micro_batches, max(longest, -(-self.problem.num_blocks // num_stages))
        )

    def _bounds(self, cell: Cell, path: float, least_path: float | None = None) -> CellBounds:
        """Bounds of a cell, of plans faster than the best; `path`: about their round trip, none is below
        `least_path` (None: `path`).
        """
        shapes = self._shapes_of(cell.schedule, cell.num_micro_batches)
        return shapes.bounds(cell, path, path if least_path is None else least_path)

    def _try_narrowly(self, entries: list[Entry], most: int) -> None:
        """Walk narrowly through the most promising cells; their entries get what was learnt of them."""
        for bound, number, cell, path, known in heapq.nsmallest(most, entries, key=lambda entry: entry[:2]):
            if bound < self.limit:
                bounds = known or self._bounds(cell, path)
                entries[number] = (max(bound, bounds.lower_bound), number, cell, path, bounds)
                self._walk_through(bounds, self.effort.narrow_width)

    def _walk(self, heap: list[Entry]) -> bool:
        """Open cells in the order of their bounds until none is below the best plan; False if the user ended it."""
        if not heap:
            return True
        total = len(heap)
        task = self.progress.task("search", total) if self.progress is not None else nullcontext()
        examined, at = set[tuple[str, int]](), 0.0
        with task as counter:
            while heap and heap[0][0] < self.limit:
                if self._cancelled():
                    return False
                if self.limit != at:
                    drop(heap, self._hopeless_of(heap))
                    examined, at = set(), self.limit
                    continue
                if counter is not None:
                    counter.advance(total - len(heap) - counter.done)
                _, number, cell, path, bounds = heap[0]
                if bounds is None and (cell.schedule, cell.num_micro_batches) not in examined:
                    examined.add((cell.schedule, cell.num_micro_batches))
                    examine(heap, cell, self.narrowed, self.limit)
                    continue
                heapq.heappop(heap)
                bounds = self.narrowed(cell, path, bounds)
                if heap and heap[0][0] < bounds.lower_bound < self.limit:
                    # Cells that look better now come first: what is found there may spare this walk.
                    heapq.heappush(heap, (bounds.lower_bound, number, cell, path, bounds))
                    continue
                if bounds.lower_bound < self.limit:
                    if self.num_candidates < self.effort.most_candidates:
                        found = self.seconds
                        self.left_out = min(
                            self.left_out, self._walk_through(bounds, self.effort.width_for(self.problem))
                        )
                        if self.seconds < found:
                            self._improve()
                    else:
                        self.left_out = min(self.left_out, bounds.lower_bound)
                if counter is not None:
                    counter.advance(1)
        return True

    def narrowed(self, cell: Cell, path: float, known: CellBounds | None = None) -> CellBounds:
        """Bounds of a cell, without the stages that no plan below the limit has."""
        bounds = known or self._bounds(cell, path)
        bounds.narrow(self.limit)
        return bounds

    def _hopeless_of(self, heap: Sequence[Entry]) -> set[int]:
        """Numbers of the entries of which other processes say that they are hopeless."""
        unknown = [entry for entry in sorted(heap, key=lambda entry: entry[:2]) if entry[4] is None]
        items = [
            (entry[2], entry[3], entry[2].num_micro_batches) for entry in unknown if entry[0] < self.limit
        ]
        found = self._elsewhere(_is_hopeless_item, items)
        return {entry[1] for entry, is_hopeless in zip(unknown, found, strict=False) if is_hopeless}

    def _walk_through(self, bounds: CellBounds, width: int) -> float:
        """Simulate the plans of a cell that may be faster than the best; the least bound of those left
        out.
        """
        if bounds.lower_bound >= self.limit:
            return bounds.lower_bound
        beam = Beam(bounds, self.limit, width)
        cuts, options, places, lower = beam.complete_plans()
        self.num_candidates += beam.num_candidates
        self._simulate(bounds.pricer, bounds.cell, cuts, options, places, lower)
        self.log.opened(
            bounds.cell, bound=bounds.lower_bound, num_candidates=beam.num_candidates, best=self.seconds
        )
        return beam.left_out

    def _simulate(
        self, pricer: Pricer, cell: Cell, cuts: Ints, options: Ints, places: Ints, lower: Floats
    ) -> None:
        """Price plans in the order given (ascending bounds) until the bounds say that the rest is slower than
        the best.
        """
        most = max(1, _SIMULATED_AT_ONCE // (cell.num_stages * cell.num_micro_batches))
        first, count = 0, 16
        while first < len(cuts) and lower[first] < self.limit:
            part = slice(first, first + min(count, most))
            seconds = plans_step_seconds(pricer, cuts[part], options[part], places[part], cell.placement)
            self.log.priced(cell.num_stages, float(seconds.min()))
            for index in np.argsort(seconds, kind="stable")[: self.num_plans].tolist():
                if seconds[index] < self.limit:
                    chosen = (array[part][index] for array in (cuts, options, places))
                    self._keep(make_solution(pricer, cell, *chosen, step_seconds=float(seconds[index])))
            first, count = part.stop, 4 * count

    def _try_again(self, start: Solution) -> None:
        """Price a plan of another problem in this one."""
        found = in_problem(self.problem, start)
        if found is not None:
            pricer, cell, options = found
            bounds, places = np.array([start.bounds]), np.array([start.places])
            self._simulate(pricer, cell, bounds, options[None], places, np.zeros(1))

    def _improve(self) -> None:
        """Change the best plan a little as long as that helps."""
        for _ in range(_MAX_IMPROVEMENTS):
            best = self.best
            assert best is not None, "there is a plan to improve"
            if best.placement != "stage_major":
                return
            pricer = self._pricer(best.schedule, best.num_micro_batches)
            cell = Cell(
                schedule=best.schedule, num_micro_batches=best.num_micro_batches, num_stages=best.num_stages
            )
            cuts, options, places = neighbours(pricer, best)
            self.num_candidates += len(cuts)
            if len(cuts):
                lower = plans_lower_bounds(pricer, cuts, options, places)
                order = np.argsort(lower, kind="stable")
                order = order[lower[order] < self.limit]
                self._simulate(pricer, cell, cuts[order], options[order], places[order], lower[order])
            if self.best is best:
                return


def _cells_of_item(search: StageSearch, item: tuple[ScheduleName, Sequence[int], int]) -> object:
    return search.cells_with(*item)


def _is_hopeless_item(search: StageSearch, item: tuple[Cell, float, int]) -> bool:
    return search.narrowed(*item[:2]).lower_bound >= search.limit
