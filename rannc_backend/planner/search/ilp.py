"""The stage search as mixed-integer programmes, solved by HiGHS (`scipy.optimize.milp`): option solver, "ilp".

In: a `SearchProblem` and seconds. Out: a `SearchResult`, of the same problem and prices as `StageSearch` (search.py) has.

Method. Cells (schedule, micro-batches, number of stages, placement) in the order of their bounds, as there. Stages that no
plan faster than the best has are dropped with the same bounds, which hold for every plan. A cell is then one programme:

* x[s, j] in [0, 1]: stage s is choice j, a run of blocks on a number of replicas of a *kind*. A kind is all that its seconds
  depend on besides: rows of the stage before, whether the link to it is near, where in a node it begins.
* Blocks: what ends with stage s begins with stage s + 1. Ranks: t[s, a] in [0, 1], a flow along the places at which a stage
  can begin after another; its arcs of a kind have as much of the flow as the x of that kind.
* Integers: at which block each stage begins, and of which kind it is. With these all of x is 0 or 1, and the flow along the
  places falls into paths whose arcs all are of the chosen kinds: any of them is a plan with these seconds.
* d[k, s], the terms of `longest_path` (schedule/chain.py), are sums over x. T >= counts * d for paths of the step.

The step is T, and the longest sum of new values and of copies. Proof that it is exact: the order of a cell's computations and
messages is given, so a step is the maximum over the paths of what waits for what, each a sum of terms d with whole numbers.
Every row `T >= path` therefore holds for every plan, and a programme that has some of the paths is a relaxation. When a
solution comes whose longest path is longer than T, that path becomes a row. There are finitely many, so at last T is the step
of the solution, which no plan of the cell is faster than. Memory is in the choices: a choice takes of the budgets that fit at
its place the fastest. Limits of pipelines: the balance is linear; a plan that breaks the bubble is cut off by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rannc_backend.errors import OptionValueError
from rannc_backend.planner.search.bounds import CellBounds
from rannc_backend.planner.search.problem import Floats, Ints, StageTerms, plans_step_seconds
from rannc_backend.planner.search.search import SearchResult, StageSearch
from rannc_backend.planner.search.sums import Cell
from rannc_backend.schedule.chain import LongestPath, longest_path

logger = logging.getLogger(__name__)

_PROVEN_TO = 1e-7  # relative: the solver's own tolerance
_SCALE = 1e3  # seconds are scaled to this at the best plan: tolerances of the solver are absolute
_MAX_CHOICES = 300_000  # of a cell: memory and time of a programme
_MAX_RELAXED_ROUNDS = 60  # rounds in which paths are added to the programme without integers


@dataclass(slots=True, eq=False, kw_only=True)
class Stage:
    """One place of a cell: choices times kinds, arrays [n]; arcs [a] between places; terms [rows, n]."""

    begins: Ints
    ends: Ints
    options: Ints
    kinds: Ints
    terms: Floats  # [8 of `longest_path`, work, new values, copies; n]
    compute: Floats
    sources: Ints  # nodes of the stage before, [a]
    nodes: Ints  # nodes of this stage
    arc_kinds: Ints
    num_kinds: int


@dataclass(slots=True, eq=False)
class CellProgramme:
    """The programme of one cell. Raises `OptionValueError` without scipy."""

    bounds: CellBounds
    limit: float
    stages: list[Stage] = field(init=False)
    paths: list[LongestPath] = field(init=False, default_factory=list)
    excluded: list[Ints] = field(
        init=False, default_factory=list
    )  # columns of integers of plans that are not allowed
    places: list[list[tuple[int, int]]] = field(init=False)  # by stage, (place, option) of its nodes
    scale: float = field(init=False)
    first: dict[tuple[str, int], int] = field(
        init=False, default_factory=dict
    )  # column of each group of a stage
    total: int = field(init=False, default=0)  # column of T; then new values, copies, the fastest stage
    num_columns: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        longest = self.limit
        if not np.isfinite(longest):
            computes = [float(each.compute.max(initial=0.0)) for each in self.bounds.choices]
            longest = self.cell.num_micro_batches * sum(computes)
        self.scale = _SCALE / longest if longest > 0 else 1.0
        self.places, self.stages = [], []
        for stage in range(self.cell.num_stages):
            self._add_stage(stage)
        self._number_columns()
        self._add_first_paths()

    @property
    def cell(self) -> Cell:
        return self.bounds.cell

    @property
    def num_choices(self) -> int:
        return sum(len(stage.begins) for stage in self.stages)

    def _add_stage(self, stage: int) -> None:
        """Arcs from the places of the stage before, their kinds, and the choices of each."""
        cell, pricer = self.cell, self.bounds.pricer
        choices = self.bounds.choices[cell.num_stages - stage - 1]
        options = sorted(set(choices.options.tolist()))
        arcs = self._arcs(stage, options)
        nodes = list(dict.fromkeys(node for _, node in arcs))
        self.places.append(nodes)
        number = {node: index for index, node in enumerate(nodes)}
        before = {node: index for index, node in enumerate(self.places[stage - 1])} if stage else {}
        kinds: dict[tuple[object, ...], int] = {}
        parts: list[tuple[Any, ...]] = []
        arc_kinds = []
        known: dict[tuple[object, ...], int] = {}
        per_node = pricer.problem.cluster.devices_per_node
        for source, node in arcs:
            (place, option), near = node, self._is_near(source, node)
            key = (option, place % per_node, near, source and pricer.tables.rows[source[1]])
            if key not in known:
                here = np.flatnonzero(choices.options == option)
                terms = self._terms(stage, choices.begins[here], choices.ends[here], source, node)
                named = (option, terms.tobytes())
                if named not in kinds:
                    kinds[named] = len(kinds)
                    parts.append((choices.begins[here], choices.ends[here], option, terms))
                known[key] = kinds[named]
            arc_kinds.append(known[key])
        sizes = [len(part[0]) for part in parts]
        terms = np.concatenate([part[3] for part in parts], axis=1) if parts else np.zeros((12, 0))
        self.stages.append(
            Stage(
                begins=np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, dtype=np.int64),
                ends=np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, dtype=np.int64),
                options=np.repeat([part[2] for part in parts], sizes).astype(np.int64),
                kinds=np.repeat(np.arange(len(parts)), sizes),
                terms=terms[:11],
                compute=terms[11],
                sources=np.array(
                    [before.get(source, 0) if source else 0 for source, _ in arcs], dtype=np.int64
                ),
                nodes=np.array([number[node] for _, node in arcs], dtype=np.int64),
                arc_kinds=np.array(arc_kinds, dtype=np.int64),
                num_kinds=len(parts),
            )
        )

    def _arcs(self, stage: int, options: list[int]) -> list[tuple[tuple[int, int] | None, tuple[int, int]]]:
        """(place and option of the stage before, of this one): the next free rank or the next node."""
        cell, problem = self.cell, self.bounds.pricer.problem
        replicas = self.bounds.pricer.tables.replicas
        if cell.placement == "replica_major":
            source = (stage - 1, cell.option or 0) if stage else None
            return [(source, (stage, option)) for option in options]
        if not stage:
            return [(None, (0, option)) for option in options]
        per_node = problem.cluster.devices_per_node
        result: list[tuple[tuple[int, int] | None, tuple[int, int]]] = []
        for source in self.places[stage - 1]:
            free = source[0] + int(replicas[source[1]])
            for place in dict.fromkeys((free, -(-free // per_node) * per_node)):
                result += [
                    (source, (place, option))
                    for option in options
                    if place + replicas[option] <= problem.num_devices
                ]
        return result

    def _is_near(self, source: tuple[int, int] | None, node: tuple[int, int]) -> bool:
        if source is None or self.cell.placement == "replica_major":
            return False
        per_node, replicas = (
            self.bounds.pricer.problem.cluster.devices_per_node,
            self.bounds.pricer.tables.replicas,
        )
        return bool(source[0] // per_node == (node[0] + replicas[node[1]] - 1) // per_node)

    def _terms(
        self, stage: int, begins: Ints, ends: Ints, source: tuple[int, int] | None, node: tuple[int, int]
    ) -> Floats:
        """[12, n]: see `Stage`; the last row is c."""
        cell, pricer = self.cell, self.bounds.pricer
        (place, option), ones = node, np.ones(len(begins), dtype=np.int64)
        found: StageTerms = pricer.stage(
            cell.num_stages - stage,
            begins,
            ends - begins,
            option * ones,
            place * ones,
            before_options=None if source is None else source[1] * ones,
            before_places=None if source is None else source[0] * ones,
            placement=cell.placement,
            num_stages=cell.num_stages,
        )
        splits = pricer.described.splits_backward
        weight = found.weight if splits else np.zeros_like(found.weight)
        last = weight if splits else found.backward
        compute = found.forward + found.backward
        rows = [
            found.forward, found.backward, found.backward - weight, weight, found.message, found.gradient,
            found.allreduce - last * (1 - 1 / found.num_buckets), found.allreduce / found.num_buckets,
            int(pricer.tables.replicas[option]) * compute, found.new_values,
            pricer.problem.copying(begins, ends - begins), compute,
        ]  # fmt: skip
        terms = np.stack(rows) * self.scale
        assert np.isfinite(terms).all(), "choices fit"
        return terms

    def _number_columns(self) -> None:
        """Columns: x, t, kinds and begins of all stages, d; T, new values, copies, fastest."""
        count = 0
        num_blocks = self.bounds.pricer.problem.num_blocks
        for index, stage in enumerate(self.stages):
            sizes = {
                "x": len(stage.begins),
                "t": len(stage.nodes),
                "kind": stage.num_kinds,
                "begin": num_blocks,
                "d": 11,
            }
            for name, size in sizes.items():
                self.first[name, index] = count
                count += size
        self.total = count  # T
        self.num_columns = count + 4

    def _add_first_paths(self) -> None:
        """The longest paths where one stage takes nearly all of the time, and where all take equally long."""
        p = self.cell.num_stages
        for stage in (*range(p), -1):
            terms = np.full((8, p), 1.0 if stage < 0 else 1e-3)
            terms[4:] *= 1e-3
            if stage >= 0:
                terms[:4, stage] = 1.0
            self.add_path(terms)

    def add_path(self, terms: Floats) -> float:
        """Add the longest path of a step with these terms [8, stages], and give its length."""
        found = longest_path(terms, self.bounds.pricer.described, self.cell.num_micro_batches)
        self.paths.append(found)
        return found.seconds

    def rows(self) -> Iterator[tuple[Ints, Floats, float, float]]:
        """(columns, factors, lower, upper) of each constraint."""
        one, inf = np.ones(1), np.inf
        problem = self.bounds.pricer.problem
        for index, stage in enumerate(self.stages):
            x, t = self.first["x", index], self.first["t", index]
            kind, begin, d = (self.first[name, index] for name in ("kind", "begin", "d"))
            if not index:
                yield x + np.arange(len(stage.begins)), np.ones(len(stage.begins)), 1.0, 1.0
            else:
                before = self.stages[index - 1]
                for block in range(1, problem.num_blocks):
                    ended, begun = np.flatnonzero(before.ends == block), np.flatnonzero(stage.begins == block)
                    columns = np.concatenate([self.first["x", index - 1] + ended, x + begun])
                    if len(columns):
                        yield columns, np.repeat([1.0, -1.0], [len(ended), len(begun)]), 0.0, 0.0
                for node in range(len(self.places[index - 1])):
                    into, out = np.flatnonzero(before.nodes == node), np.flatnonzero(stage.sources == node)
                    columns = np.concatenate([self.first["t", index - 1] + into, t + out])
                    yield columns, np.repeat([1.0, -1.0], [len(into), len(out)]), 0.0, 0.0
            for each in range(stage.num_kinds):
                of_kind = x + np.flatnonzero(stage.kinds == each)
                arcs = t + np.flatnonzero(stage.arc_kinds == each)
                for columns in (of_kind, arcs):
                    yield np.append(columns, kind + each), np.append(np.ones(len(columns)), -1.0), 0.0, 0.0
            for block in range(problem.num_blocks):
                columns = x + np.flatnonzero(stage.begins == block)
                yield np.append(columns, begin + block), np.append(np.ones(len(columns)), -1.0), 0.0, 0.0
            for row, values in enumerate(stage.terms):
                some = np.flatnonzero(values)
                yield np.append(x + some, d + row), np.append(values[some], -1.0), 0.0, 0.0
            for row, column in ((9, self.total + 1), (10, self.total + 2)):
                yield np.array([column, d + row]), np.array([1.0, -1.0]), 0.0, inf
            yield from self._balance(d)
        work = np.array([self.first["d", index] + 8 for index in range(len(self.stages))])
        number = self.cell.num_micro_batches / problem.num_cores
        yield np.append(self.total, work), np.append(one, np.full(len(work), -number)), 0.0, inf
        for path in self.paths:
            places = np.nonzero(path.counts)
            columns = np.array([self.first["d", s] + row for row, s in zip(*places, strict=True)])
            yield np.append(self.total, columns), np.append(one, -path.counts[places]), 0.0, inf
        for columns in self.excluded:
            yield columns, np.ones(len(columns)), -inf, len(columns) - 1.0

    def _balance(self, d: int) -> Iterator[tuple[Ints, Floats, float, float]]:
        """No stage is faster than "fastest", and none slower than that allows."""
        slowest = float(self.bounds.pricer.problem.limits.slowest_of(np.ones(1))[0])
        if np.isfinite(slowest):
            compute = np.array([d, d + 1, self.total + 3])
            yield compute, np.array([1.0, 1.0, -1.0]), 0.0, np.inf
            yield compute, np.array([-1.0, -1.0, slowest]), 0.0, np.inf

    def solve(self, seconds: float, *, whole: bool) -> Any:
        """scipy's result. `whole`: False leaves out that integers are whole."""
        milp, constraint, bounds_of, matrix_of = _highs()
        all_rows = list(self.rows())
        columns = np.concatenate([row[0] for row in all_rows])
        lines = np.repeat(np.arange(len(all_rows)), [len(row[0]) for row in all_rows])
        factors = np.concatenate([row[1] for row in all_rows])
        matrix = matrix_of((factors, (lines, columns)), shape=(len(all_rows), self.num_columns))
        lower, upper = np.zeros(self.num_columns), np.ones(self.num_columns)
        integers = np.zeros(self.num_columns)
        for index in range(len(self.stages)):
            d = self.first["d", index]
            lower[d : d + 11], upper[d : d + 11] = -np.inf, np.inf
            integers[self.first["kind", index] : d] = 1.0
        upper[self.total :] = np.inf
        objective = np.zeros(self.num_columns)
        objective[self.total : self.total + 3] = 1.0
        limits = [constraint(matrix, [row[2] for row in all_rows], [row[3] for row in all_rows])]
        if np.isfinite(self.limit):
            # Well below the best, beside the solver's tolerance.
            limits.append(
                constraint(objective[None], -np.inf, self.limit * self.scale * (1 - _PROVEN_TO / 2))
            )
        return milp(
            objective,
            integrality=integers if whole else np.zeros(self.num_columns),
            bounds=bounds_of(lower, upper),
            constraints=limits,
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": _PROVEN_TO / 10},
        )

    def terms_of(self, values: Floats) -> Floats:
        """[8, stages]: d of a solution."""
        first = [self.first["d", index] for index in range(len(self.stages))]
        return np.array([values[d : d + 8] for d in first]).T

    def plan_of(self, values: Floats) -> tuple[Ints, Ints, Ints, Ints]:
        """Cuts [p + 1], options and places [p] of a whole solution, and the columns of its integers."""
        chosen = []
        for index, stage in enumerate(self.stages):
            x = self.first["x", index]
            chosen.append(int(values[x : x + len(stage.begins)].argmax()))
        cuts = [0, *(int(stage.ends[j]) for stage, j in zip(self.stages, chosen, strict=True))]
        kinds = [int(stage.kinds[j]) for stage, j in zip(self.stages, chosen, strict=True)]
        options = [int(stage.options[j]) for stage, j in zip(self.stages, chosen, strict=True)]
        # From the last stage back: any path along arcs of the chosen kinds.
        reached: list[dict[int, int]] = []
        for index, stage in enumerate(self.stages):
            arcs = np.flatnonzero(stage.arc_kinds == kinds[index]).tolist()
            reached.append(
                {
                    int(stage.nodes[a]): int(stage.sources[a])
                    for a in arcs
                    if not index or stage.sources[a] in reached[-1]
                }
            )
        node = next(iter(reached[-1]))
        places = []
        for index in range(len(self.stages) - 1, -1, -1):
            places.append(self.places[index][node][0])
            node = reached[index][node]
        columns = [self.first["kind", index] + kind for index, kind in enumerate(kinds)]
        columns += [self.first["begin", index] + cuts[index] for index in range(1, len(self.stages))]
        return np.array(cuts), np.array(options), np.array(places[::-1]), np.array(columns)


def _highs() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise OptionValueError(
            "solver", value="ilp", source="the options, without scipy", expected="'dp', or install scipy"
        ) from error
    return milp, LinearConstraint, Bounds, csr_array


@dataclass(slots=True, eq=False)
class IlpSearch(StageSearch):
    """See the module docstring. `time_seconds`: of all programmes together."""

    time_seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _until: float = field(init=False, default=0.0)

    def run(self) -> SearchResult:
        """The fastest plan; where the time ends before that is proven, the best so far, with what is proven."""
        _highs()
        self._until = self.clock() + self.time_seconds
        candidates = self._candidates()
        self._try_equal_splits(candidates)
        self._try_even_shares(candidates)
        if self.best is not None:
            self._improve()
        ordered = sorted(candidates, key=lambda item: item.lower_bound)
        cells: list[tuple[float, int, Cell, float]] = []
        for candidate, found in zip(ordered, self._cells_of(ordered), strict=True):
            if found is None:
                self.left_out = min(self.left_out, candidate.lower_bound)
                continue
            cells += [
                (bound, len(cells) + index, cell, path) for index, (bound, cell, path) in enumerate(found)
            ]
        cells.sort()
        left = np.inf
        task = self.progress.task("search", len(cells)) if self.progress is not None else nullcontext()
        with task as counter:
            for bound, _, cell, path in cells:
                if bound < self.limit:
                    is_over = self.clock() >= self._until or self._cancelled()
                    left = min(left, bound if is_over else max(bound, self._solve_cell(cell, path)))
                if counter is not None:
                    counter.advance(1)
        return self._result(min(left, self.left_out))

    def _result(self, left_out: float) -> SearchResult:
        nothing_found = self.best is None and not np.isfinite(self.seconds)
        if nothing_found and left_out < np.inf and not self._cancelled():
            logger.warning("solver 'ilp' found no plan in %g s; the search by dp goes on", self.time_seconds)
            other = StageSearch(self.problem, self.effort, self.progress, num_plans=self.num_plans)
            result = other.run()
            self.best, self.seconds, self.pricers, self.kept = (
                other.best,
                other.seconds,
                other.pricers,
                other.kept,
            )
            return result
        lower = self.seconds if left_out >= self.seconds * (1 - _PROVEN_TO) else left_out
        result = SearchResult(
            solution=self.best,
            lower_bound=lower,
            num_candidates=self.num_candidates,
            ended=not self._cancelled(),
        )
        if result.proven_gap:
            logger.warning(
                "solver 'ilp': not proven in %g s (solver_seconds): a plan may be faster by %.3g %%",
                self.time_seconds,
                100 * result.proven_gap,
            )
        return result

    def _solve_cell(self, cell: Cell, path: float) -> float:
        """A lower bound of the cell's plans, of which faster ones than the best have become the best."""
        bounds = self._bounds(cell, path)
        bounds.narrow(self.limit)
        if bounds.lower_bound >= self.limit:
            return bounds.lower_bound
        if sum(map(len, bounds.choices)) > _MAX_CHOICES:
            return bounds.lower_bound
        programme = CellProgramme(bounds, self.limit)
        if programme.num_choices > _MAX_CHOICES or not all(len(stage.begins) for stage in programme.stages):
            return np.inf if programme.num_choices <= _MAX_CHOICES else bounds.lower_bound
        lower = max(bounds.lower_bound, self._relaxed(programme))
        while lower < self.limit and self.clock() < self._until:
            found = programme.solve(self._until - self.clock(), whole=True)
            self.num_candidates += 1
            if found.status == 2:  # infeasible: nothing is faster than the best
                return self.seconds
            if found.mip_dual_bound is not None:
                lower = max(lower, float(found.mip_dual_bound) / programme.scale)
            if found.x is None:
                break
            seconds, columns = self._priced(programme, found.x)
            programme.limit = min(programme.limit, self.limit)
            length = programme.add_path(programme.terms_of(found.x)) / programme.scale
            if not np.isfinite(seconds) or self.num_plans > 1:
                programme.excluded.append(columns)
            elif (
                length <= float(found.x[programme.total]) / programme.scale * (1 + _PROVEN_TO)
                and found.status == 0
            ):
                # The path is a row already: that was the optimum of the cell.
                return max(lower, min(seconds, self.seconds))
        return lower

    def _relaxed(self, programme: CellProgramme) -> float:
        """A lower bound, from the programme without integers; paths that count there are added."""
        lower = programme.bounds.lower_bound
        for _ in range(_MAX_RELAXED_ROUNDS):
            found = programme.solve(self._until - self.clock(), whole=False)
            if found.status == 2:
                return self.seconds
            if found.x is None:
                break
            if found.status == 0:
                lower = float(found.fun) / programme.scale
            length = programme.add_path(programme.terms_of(found.x))
            if length <= float(found.x[programme.total]) * (1 + 1e-6) or self.clock() >= self._until:
                break
        return lower

    def _priced(self, programme: CellProgramme, values: Floats) -> tuple[float, Ints]:
        """Simulate the plan of a solution, which may be the best; its seconds, inf where it is not allowed."""
        cuts, options, places, columns = programme.plan_of(values)
        pricer, cell = programme.bounds.pricer, programme.cell
        plan = (cuts[None], options[None], places[None])
        self._simulate(pricer, cell, *plan, np.zeros(1))
        return float(plans_step_seconds(pricer, *plan, cell.placement)[0]), columns
