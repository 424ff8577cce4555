"""Mixed-integer programmes find what the search by shortest paths finds, and say what they could not prove."""

from __future__ import annotations

import itertools
import logging
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import OptionValueError
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.ilp import CellProgramme, IlpSearch
from rannc_backend.planner.search.problem import SearchProblem
from rannc_backend.planner.search.search import StageSearch, search
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.search.search_problems import problems, random_problem
from tests.unit.rannc_backend.planner.search.test_limits import LIMITS


class NotImproved(IlpSearch):
    """Begins from the best equal split as it is."""

    def _improve(self) -> None:
        pass


class FromNothing(NotImproved):
    """All that is found comes from the programmes."""

    def _try_equal_splits(self, candidates) -> None:
        pass

    def _try_even_shares(self, candidates) -> None:
        pass


def check_equal(problem: SearchProblem, solver: type[IlpSearch] = FromNothing) -> None:
    expected, found = search(problem), solver(problem).run()
    assert (found.solution is None) == (expected.solution is None)
    if found.solution is not None and expected.solution is not None:
        assert found.solution.step_seconds == pytest.approx(expected.solution.step_seconds, rel=1e-6)
        assert found.proven_gap == 0.0


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_both_solvers_find_equally_fast_plans(problem: SearchProblem) -> None:
    check_equal(problem)


@settings(max_examples=40, deadline=None)
@given(problem=problems(max_blocks=6, max_devices=4), limits=LIMITS)
def test_both_solvers_keep_the_limits_of_pipelines(problem: SearchProblem, limits) -> None:
    check_equal(replace(problem, limits=limits), IlpSearch)


def test_within_a_limit_the_other_solver_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    best = search(uneven()).solution
    assert best is not None
    times = itertools.chain([0.0], itertools.repeat(10.0))
    found = NotImproved(
        uneven(), seconds=0.9 * best.step_seconds, time_seconds=5.0, clock=lambda: next(times)
    ).run()
    assert found.solution is None and "goes on" not in caplog.text


def uneven(**changes: object) -> SearchProblem:
    """Of which no equal split is the best plan."""
    return random_problem(
        3, 9, 5, devices_per_node=2, micro_batches=(4,), schedules=("1f1b",), style="layers", memory_bytes=9.0,
        message_scale=0.1, reduction_scale=0.2, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_programmes_know_links_nodes_and_cores(seed: int) -> None:
    """Several stages on several nodes, whose messages take long."""
    check_equal(
        random_problem(
            seed, 6, 6, devices_per_node=2, micro_batches=(2, 4), schedules=("1f1b", "fill_drain"),
            style=("layers", "anything")[seed % 2], memory_bytes=6.0, message_scale=1.0, reduction_scale=0.5,
            core_share=1.0 if seed % 3 else 0.4,
        )
    )  # fmt: skip


def test_programmes_alone_improve_on_equal_splits() -> None:
    """Without local moves, what is better than the first plan comes from the programmes."""
    problem = uneven()
    searched = NotImproved(problem)
    found, expected = searched.run(), search(problem)
    assert searched.equal is not None and expected.solution is not None and found.solution is not None
    assert searched.equal.step_seconds > expected.solution.step_seconds * (1 + 1e-3)
    assert found.solution.step_seconds == pytest.approx(expected.solution.step_seconds, rel=1e-9)
    assert found.num_candidates > 0


def test_what_is_not_proven_in_time_is_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    times = itertools.chain([0.0], itertools.repeat(10.0))
    with caplog.at_level(logging.WARNING):
        result = NotImproved(uneven(), time_seconds=5.0, clock=lambda: next(times)).run()
    best = search(uneven()).solution
    assert result.solution is not None and best is not None
    assert 0 < result.proven_gap < 1 and result.lower_bound <= best.step_seconds
    assert f"faster by {100 * result.proven_gap:.3g} %" in caplog.text


def test_without_a_plan_in_time_the_other_solver_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IlpSearch, "_try_equal_splits", lambda self, candidates: None)
    times = itertools.chain([0.0], itertools.repeat(10.0))
    found = IlpSearch(uneven(), time_seconds=5.0, clock=lambda: next(times)).run()
    best = search(uneven()).solution
    assert found.solution is not None and best is not None
    assert found.solution.step_seconds == best.step_seconds


def plan_with(**options: object):
    cluster = local_cpu(4, memory_bytes=10**9)
    return plan_blocks(
        random_line(5, 6), Config(max_pipeline=4, **options), cluster=cluster, batch_rows=12, fingerprint="f" * 64,
        schedules=("1f1b", "fill_drain"), pricer=AnalyticPricer(device=cluster.device),
    )  # fmt: skip


def test_the_option_chooses_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = IlpSearch.run
    monkeypatch.setattr(IlpSearch, "run", lambda self: (asked.append(self.time_seconds), run(self))[1])
    by_paths = plan_with()
    assert not asked
    by_programmes = plan_with(solver="ilp", solver_seconds=7.5)
    assert asked and set(asked) == {7.5}
    assert by_programmes.predicted_step_seconds == pytest.approx(by_paths.predicted_step_seconds, rel=1e-6)
    assert by_programmes.proven_gap == 0.0


def test_without_scipy_the_option_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(OptionValueError, match="install scipy"):
        plan_with(solver="ilp")


@settings(max_examples=30, deadline=None)
@given(problem=problems(max_blocks=6, max_devices=6), data=st.data())
def test_a_programme_has_every_plan_of_its_cell(problem: SearchProblem, data: st.DataObject) -> None:
    """The relaxation is below the best plan of the cell, and the programme reaches it without a limit."""
    best = search(problem).solution
    if best is None or best.placement != "stage_major":
        return
    key = (best.schedule, best.num_micro_batches)
    only = replace(problem, schedules=key[:1], micro_batches=key[1:])
    searched = StageSearch(only)
    cells = [cell for found in searched._cells_of(searched._candidates()) if found for _, cell, _ in found]
    cell = next(
        cell for cell in cells if (cell.num_stages, cell.placement) == (best.num_stages, best.placement)
    )
    programme = CellProgramme(searched._bounds(cell, 1.0, 0.0), float("inf"))
    relaxed = programme.solve(60.0, whole=False)
    assert relaxed.fun / programme.scale <= best.step_seconds * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4), most=st.integers(2, 3))
def test_both_solvers_keep_equally_fast_plans(problem: SearchProblem, most: int) -> None:
    expected, found = StageSearch(problem, num_plans=most), FromNothing(problem, num_plans=most)
    expected.run()
    found.run()
    steps = [[each.step_seconds for each in searched.kept] for searched in (expected, found)]
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)


def test_a_plan_lists_the_other_plans_that_were_kept() -> None:
    alone, several = plan_with(), plan_with(num_plans=4)
    assert several.predicted_step_seconds == alone.predicted_step_seconds and several.stages == alone.stages
    others = [each for each in several.alternatives if "of the best plans" in each.reason]
    assert several.alternatives[len(others) :] == alone.alternatives
    assert [each.reason.split(":")[0] for each in others] == [
        f"number {place} of the best plans" for place in (2, 3, 4)
    ]
    steps = [each.predicted_step_seconds for each in others]
    assert several.predicted_step_seconds <= steps[0] and steps == sorted(steps)
    shapes = [
        (each.schedule, each.num_micro_batches, each.stage_replicas, step)
        for each, step in zip(others, steps, strict=True)
    ]
    assert len(set(shapes)) == 3
