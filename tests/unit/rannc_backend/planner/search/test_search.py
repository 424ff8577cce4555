"""The stage search equals brute force over the same objective, and its answers are ordered as they must
be.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.log.progress import Cancellation
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.search.bounds import Cell, Shapes, rounded_down
from rannc_backend.planner.search.equal_split import Candidate, _bounds_without_tables, best_equal_split
from rannc_backend.planner.search.feasibility import is_feasible, smallest_memory
from rannc_backend.planner.search.moves import Effort, honours, quick_bounds
from rannc_backend.planner.search.over_intervals import WorkFloor
from rannc_backend.planner.search.problem import Pricer, SearchProblem, plans_step_seconds
from rannc_backend.planner.search.search import StageSearch, search
from rannc_backend.schedule.orders import schedule_named, schedule_names
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.search.search_problems import (
    Numbers,
    brute_force,
    problems,
    random_problem,
    step_of_each_shape,
)

INFINITY = float("inf")


def seconds_of(problem: SearchProblem) -> float:
    solution = search(problem).solution
    return INFINITY if solution is None else solution.step_seconds


def check_optimal(problem: SearchProblem) -> None:
    expected = brute_force(problem)
    result = search(problem)
    assert (result.solution is None) == (expected == INFINITY) == (not is_feasible(problem))
    if result.solution is not None:
        assert result.solution.step_seconds == pytest.approx(expected, rel=1e-8, abs=1e-12)
        assert result.proven_gap == 0.0
        check_solution(problem, result.solution)


def check_solution(problem: SearchProblem, solution) -> None:
    """It is a plan that the problem allows, and costs what it says."""
    assert solution.bounds[0] == 0 and solution.bounds[-1] == problem.num_blocks
    assert honours(problem, solution.bounds, solution.replicas)
    ranks = [rank for stage in range(solution.num_stages) for rank in solution.ranks(stage)]
    assert len(set(ranks)) == len(ranks) == sum(solution.replicas) and max(ranks) < problem.num_devices
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule)
    options = np.searchsorted(pricer.tables.replicas, solution.replicas)
    arrays = (np.array([values]) for values in (solution.bounds, options, solution.places))
    assert plans_step_seconds(pricer, *arrays, solution.placement)[0] == solution.step_seconds


@settings(max_examples=700, deadline=None)
@given(problem=problems())
def test_the_search_equals_brute_force(problem: SearchProblem) -> None:
    check_optimal(problem)


@pytest.mark.full
@settings(max_examples=10_000, deadline=None)
@given(problem=problems())
def test_the_search_equals_brute_force_at_length(problem: SearchProblem) -> None:
    check_optimal(problem)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_blocks=6, max_devices=4), factor=st.floats(1.0, 4.0))
def test_more_memory_devices_or_bandwidth_are_never_slower(problem: SearchProblem, factor: float) -> None:
    cluster, before = problem.cluster, seconds_of(problem)
    fast = replace(
        cluster,
        intra_node=replace(cluster.intra_node, bytes_per_second=factor * cluster.intra_node.bytes_per_second),
        inter_node=replace(cluster.inter_node, latency_seconds=cluster.inter_node.latency_seconds / factor),
    )
    others = [replace(problem, memory_bytes=factor * problem.memory_bytes), replace(problem, cluster=fast)]
    others.append(replace(problem, cluster=replace(cluster, num_devices=cluster.num_devices + 1)))
    for other in others:
        assert seconds_of(other) <= before * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4))
def test_the_smallest_memory_is_just_enough(problem: SearchProblem) -> None:
    memory = smallest_memory(problem)
    if memory is None:
        assert brute_force(replace(problem, memory_bytes=1e9)) == INFINITY
        return
    assert brute_force(replace(problem, memory_bytes=memory)) < INFINITY
    assert memory <= 1 or brute_force(replace(problem, memory_bytes=memory - 1)) == INFINITY


@settings(max_examples=100, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4), limit=st.floats(0.5, 1.5) | st.just(1 + 1e-6))
def test_no_bound_is_above_the_best_plan_of_its_cell(problem: SearchProblem, limit: float) -> None:
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            shapes = Shapes(Pricer(problem, number, schedule))
            first = shapes.first_bounds(list(problem.stage_counts))
            for count in problem.stage_counts:
                only = replace(problem, schedules=(schedule,), micro_batches=(number,))
                if problem.stage_replicas is None:
                    only = replace(only, num_stages=count)
                best = brute_force(replace(only, cluster=replace(problem.cluster, devices_per_node=64)))
                if problem.cluster.devices_per_node < problem.num_devices or best == INFINITY:
                    continue
                cell = Cell(schedule=schedule, num_micro_batches=number, num_stages=count)
                bounds = shapes.bounds(cell, shapes.least_path)
                assert max(first[count][0], bounds.lower_bound) <= best * (1 + 1e-9)
                # Narrowing keeps plans faster than the limit: the best one if it is above.
                bounds.narrow(limit * best)
                assert limit <= 1 or bounds.lower_bound <= best * (1 + 1e-9)


@given(number=st.integers(0, 5000), num_stages_to_end=st.integers(1, 300), micro_batches=st.integers(1, 300))
def test_places_with_about_as_many_stages_before_them_share_the_least_memory(
    number: int, num_stages_to_end: int, micro_batches: int
) -> None:
    low = rounded_down(number)
    assert low == number if number < 16 else 7 / 8 * number < low <= number
    assert rounded_down(low) == low
    for name in schedule_names():
        described = schedule_named(name)
        at = [
            float(
                described.kept_memory(num_stages_to_end, num_stages_to_end + before, micro_batches, 3.0, 1.0)
            )
            for before in (low, number)
        ]
        assert at[0] <= at[1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), num_blocks=st.integers(1, 6), num_devices=st.integers(1, 4), share=st.sampled_from([1.0, 0.5]),
    memory=st.sampled_from([10**9, 2 * 10**9, 10**11]),
)  # fmt: skip
def test_bounds_from_blocks_alone_hide_no_plan(
    seed: int, num_blocks: int, num_devices: int, share: float, memory: int
) -> None:
    cluster = local_cpu(num_devices, memory_bytes=memory)
    cluster = replace(cluster, device=replace(cluster.device, core_share=share))
    config, pricer = Config(max_pipeline=4), AnalyticPricer(device=cluster.device)
    request = PlanRequest.of(
        random_line(seed, num_blocks), config, cluster, pricer, 12, ("1f1b", "fill_drain"), None
    )
    problem = request.problem(request.costs())
    check_optimal(problem)
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            only = replace(problem, schedules=(schedule,), micro_batches=(number,))
            bounds = quick_bounds(problem, schedule, number)
            for count in problem.stage_counts:
                assert bounds.get(count, INFINITY) <= brute_force(replace(only, num_stages=count)) * (
                    1 + 1e-9
                )
            whole = Pricer(problem, number, schedule, problem.num_blocks)
            for count in problem.stage_counts:
                split = Candidate(
                    schedule=schedule, num_micro_batches=number, bounds={count: 0.0},
                    make_pricer=lambda num_stages, limit, whole=whole: whole,
                )  # fmt: skip
                equal = best_equal_split(replace(problem, work_floor=None), [split])
                bound = _bounds_without_tables(problem, split).get(count, INFINITY)
                assert equal is None or bound <= equal.step_seconds
            seconds = (whole.tables.forward + whole.least_backward).min(
                axis=(0, 2)
            )  # by length, of what fits
            for limit in (*(number * seconds[np.isfinite(seconds)]), INFINITY):
                faster = np.flatnonzero(np.isfinite(seconds) & (number * seconds <= limit))
                assert problem.longest_stage(number, limit) >= faster.max(initial=0) + 1


def test_the_longest_stage_is_of_blocks_that_there_are() -> None:
    """Intervals beyond the last block are short ones, however many blocks they are asked for."""
    lengths = np.minimum(np.arange(1, 11)[None, :], 10 - np.arange(10)[:, None]).astype(float)
    floor = WorkFloor(work=np.ones(10), held_bytes=lengths, most_replicas=2)
    assert [floor.longest_stage(memory, INFINITY) for memory in (1.0, 3.0, 10.0)] == [1, 3, 10]
    assert [floor.longest_stage(10.0, seconds) for seconds in (0.5, 2.0, INFINITY)] == [1, 4, 10]


def layered_problem(
    num_blocks: int, num_devices: int, memory_bytes: float = 1e9, **others: object
) -> SearchProblem:
    return random_problem(
        3, num_blocks, num_devices, devices_per_node=4, micro_batches=(2, 4, 8), schedules=("1f1b", "fill_drain"), style="layers",
        memory_bytes=memory_bytes, message_scale=0.05, reduction_scale=0.1, **others,
    )  # fmt: skip


def test_the_same_problem_gives_the_same_solution() -> None:
    problem = layered_problem(24, 12, 60.0)
    assert search(problem) == search(problem)


def test_a_search_that_stops_early_says_how_far_it_may_be_from_the_best() -> None:
    problem = layered_problem(24, 8, 60.0)
    whole = search(problem, effort=Effort(whole_size=10**6))
    short = search(problem, effort=Effort(narrow_width=2, num_narrow_cells=1, width=2, most_candidates=1))
    assert whole.proven_gap == 0.0 < short.proven_gap
    assert (
        short.lower_bound
        <= whole.solution.step_seconds * (1 + 1e-9)
        <= short.solution.step_seconds * (1 + 1e-8)
    )


class Interrupted:
    """Progress of a user who gives up at once."""

    def __init__(self) -> None:
        self.cancellation = Cancellation(requested=True)

    def task(self, name: str, total: int | None):
        raise AssertionError(f"{name} begins after the interruption")

    def cancelled(self) -> bool:
        return self.cancellation.requested


def test_an_interrupted_search_gives_the_best_so_far_and_proves_little() -> None:
    problem = layered_problem(24, 8, 60.0)
    result = StageSearch(problem, progress=Interrupted()).run()
    assert result.solution is not None and not result.ended and result.proven_gap > 0
    check_solution(problem, result.solution)


def test_a_search_keeps_few_tables_and_makes_few_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for all numbers of micro-batches, they took gigabytes on a thousand devices."""
    problem = random_problem(
        3, 12, 6, devices_per_node=4, micro_batches=tuple(range(2, 62)), schedules=("1f1b", "fill_drain"), style="layers",
        memory_bytes=60.0, message_scale=0.05, reduction_scale=0.1,
    )  # fmt: skip
    made: list[tuple[str, int, float]] = []
    real = Shapes.__init__

    def counted(self: Shapes, pricer: Pricer, limit: float = INFINITY) -> None:
        made.append((pricer.schedule, pricer.num_micro_batches, limit))
        real(self, pricer, limit)

    monkeypatch.setattr(Shapes, "__init__", counted)
    stages = StageSearch(problem)
    assert stages.run().proven_gap == 0.0
    assert len({each[:2] for each in made}) > 48
    assert len(stages.shapes) <= 3 and len(stages.pricers) <= 48
    # All cells with the same prices are looked at together.
    assert len(made) <= 4 * len(set(made))


def test_a_plan_of_another_problem_is_begun_from_only_where_it_fits() -> None:
    problem = layered_problem(12, 6, 60.0)
    best = search(problem)
    assert StageSearch(problem).run_shortly(best.solution).step_seconds <= best.solution.step_seconds * (
        1 + 1e-9
    )
    smaller = replace(problem, cluster=replace(problem.cluster, num_devices=1))
    assert sum(StageSearch(smaller).run_shortly(best.solution).replicas) == 1
    assert StageSearch(replace(problem, memory_bytes=0.01)).run_shortly(best.solution) is None


def heavy_head(weight: float) -> SearchProblem:
    """Nine equal layers and a last block that weighs as much as `weight` of them; one stage of all does not
    fit.
    """
    weights = np.array([1.0] * 9 + [weight])
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    base = layered_problem(10, 4, 7.0, num_stages=None)
    ends = np.minimum(np.arange(10)[:, None] + np.arange(1, 11)[None, :], 10)
    inside = np.arange(10)[:, None] + np.arange(1, 11)[None, :] <= 10
    spans = (sums[ends] - sums[:-1, None])[:, :, None]
    tables = {}
    for number in (8,):
        old = base.tables(number)
        forward = np.where(inside[:, :, None], spans / number / old.replicas, INFINITY)
        held = (ends - np.arange(10)[:, None])[:, :, None] * np.ones(len(old.replicas))
        tables[number] = replace(
            old, forward=forward, backward=2 * forward[None], fixed_bytes=held[None], flight_bytes=0 * held[None],
            message_bytes=0 * held, gradient_bytes=0 * held,
        )  # fmt: skip
    return replace(
        base, micro_batches=(8,), budgets=(1.0,), tables=Numbers(tables), own_gradient_bytes=0 * base.own_gradient_bytes,
        shared_gradient_bytes=0 * base.own_gradient_bytes,
    )  # fmt: skip


def test_a_heavy_head_is_cut_better_than_equally() -> None:
    problem = heavy_head(6.0)
    found = StageSearch(problem)
    best = found.run().solution
    equal = found.equal
    assert best is not None and equal is not None
    assert equal.step_seconds >= 1.2 * best.step_seconds
    even = heavy_head(1.0)
    candidate = Candidate(
        schedule="1f1b", num_micro_batches=8, bounds=quick_bounds(even, "1f1b", 8),
        make_pricer=lambda num_stages, limit: Pricer(even, 8, "1f1b"),
    )  # fmt: skip
    assert best_equal_split(even, [candidate]).step_seconds >= search(even).solution.step_seconds * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4), most=st.integers(2, 4))
def test_as_many_plans_are_kept_as_asked_for_the_best_ones_there_are(
    problem: SearchProblem, most: int
) -> None:
    searched = StageSearch(problem, num_plans=most)
    result = searched.run()
    best = sorted(step_of_each_shape(problem).values())[:most]
    assert [each.step_seconds for each in searched.kept] == pytest.approx(best, rel=1e-8)
    assert result.solution is (searched.kept[0] if best else None)
    for kept in searched.kept:
        check_solution(problem, kept)
