"""The stage search equals brute force over the same objective, and says truly what does not fit."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.partition.stage_search import (
    MicroBatchTables,
    SearchProblem,
    Solution,
    is_feasible,
    most_devices,
    search,
    smallest_memory,
    step_seconds,
)


def all_plans(problem: SearchProblem, devices: int | None = None):
    """Every (bounds, replicas, micro-batches) that the problem's limits permit."""
    devices = problem.num_devices if devices is None else devices
    for num_stages in range(1, min(problem.num_blocks, devices) + 1):
        if problem.num_stages not in (None, num_stages):
            continue
        for cuts in itertools.combinations(range(1, problem.num_blocks), num_stages - 1):
            for replicas in itertools.product(range(1, devices + 1), repeat=num_stages):
                if sum(replicas) != devices or (problem.replicas and set(replicas) != {problem.replicas}):
                    continue
                if problem.stage_replicas not in (None, replicas):
                    continue
                for number in problem.micro_batches:
                    yield (0, *cuts, problem.num_blocks), replicas, number


def brute_force(problem: SearchProblem) -> float:
    return min((step_seconds(problem, *plan) for plan in all_plans(problem)), default=float("inf"))


@st.composite
def problems(draw: st.DrawFn, max_blocks: int = 8, max_devices: int = 5) -> SearchProblem:
    """Small whole numbers, so that ties and exactly full memories are frequent."""
    num_blocks = draw(st.integers(1, max_blocks))
    num_devices = draw(st.integers(1, max_devices))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (num_blocks, num_blocks + 1, num_devices + 1)
    micro_batches = tuple(sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3))))
    style = draw(st.sampled_from(["anything", "additive"]))

    def table(high: int) -> np.ndarray:
        if style == "anything":
            return generator.integers(0, high + 1, shape).astype(float)
        blocks = np.concatenate([[0], np.cumsum(generator.integers(0, high + 1, num_blocks))]).astype(float)
        spans = np.maximum(blocks[None, :] - blocks[:-1, None], 0)
        return spans[:, :, None] / np.maximum(np.arange(num_devices + 1), 1)

    tables = {}
    for number in micro_batches:
        seconds = table(20)
        seconds[generator.random(shape) < 0.1] = np.inf
        tables[number] = MicroBatchTables(seconds=seconds, fixed_bytes=table(6), flight_bytes=table(4))
    forced = draw(st.sampled_from(["", "", "", "num_stages", "replicas", "stage_replicas"]))
    stage_replicas = None
    if forced == "stage_replicas":
        cuts = sorted(draw(st.sets(st.integers(1, num_devices - 1)))) if num_devices > 1 else []
        stage_replicas = tuple(b - a for a, b in zip([0, *cuts], [*cuts, num_devices], strict=True))
    return SearchProblem(
        num_blocks=num_blocks,
        num_devices=num_devices,
        schedule=draw(st.sampled_from(["1f1b", "fill_drain"])),
        micro_batches=micro_batches,
        tables=tables.__getitem__,
        allreduce_seconds=table(30),
        memory_bytes=draw(st.sampled_from([0, 3, 6, 10, 15, 1000])),
        num_stages=draw(st.integers(1, 5)) if forced == "num_stages" else None,
        replicas=draw(st.integers(1, 3)) if forced == "replicas" else None,
        stage_replicas=stage_replicas,
    )


def check_solution(problem: SearchProblem, solution: Solution) -> None:
    assert solution.bounds[0] == 0 and solution.bounds[-1] == problem.num_blocks
    assert all(a < b for a, b in itertools.pairwise(solution.bounds))
    assert sum(solution.replicas) == problem.num_devices and min(solution.replicas) >= 1
    assert (solution.bounds, solution.replicas, solution.num_micro_batches) in set(all_plans(problem))
    again = step_seconds(problem, solution.bounds, solution.replicas, solution.num_micro_batches)
    assert again == solution.step_seconds


@settings(max_examples=600, deadline=None)
@given(problem=problems())
def test_the_search_equals_brute_force(problem: SearchProblem) -> None:
    expected = brute_force(problem)
    solution = search(problem)
    assert (solution is None) == (expected == float("inf")) == (not is_feasible(problem))
    if solution is not None:
        assert solution.step_seconds == expected
        check_solution(problem, solution)
        assert search(problem) == solution
        assert search(problem, below_seconds=expected) is None


@settings(max_examples=120, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4))
def test_the_smallest_memory_is_just_enough(problem: SearchProblem) -> None:
    memory = smallest_memory(problem)
    if memory is None:
        assert brute_force(replace(problem, memory_bytes=1e9)) == float("inf")
        return
    assert brute_force(replace(problem, memory_bytes=memory)) < float("inf")
    assert memory == 0 or brute_force(replace(problem, memory_bytes=memory - 1)) == float("inf")


@settings(max_examples=120, deadline=None)
@given(problem=problems(max_blocks=5, max_devices=4))
def test_the_most_devices_that_can_be_used(problem: SearchProblem) -> None:
    if problem.stage_replicas is not None:
        return
    usable = [
        devices
        for devices in range(1, problem.num_devices + 1)
        if any(step_seconds(problem, *plan) < float("inf") for plan in all_plans(problem, devices))
    ]
    assert most_devices(problem) == max(usable, default=0)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_blocks=6, max_devices=4), more=st.integers(1, 20))
def test_more_memory_never_gives_a_slower_plan(problem: SearchProblem, more: int) -> None:
    solution = search(problem)
    if solution is not None:
        roomier = search(replace(problem, memory_bytes=problem.memory_bytes + more))
        assert roomier is not None and roomier.step_seconds <= solution.step_seconds


def layered_problem(num_blocks: int, num_devices: int, memory_bytes: float) -> SearchProblem:
    """Equal layers between a light first and a heavy last block, with launch costs: shaped like a language model."""
    weights = np.ones(num_blocks)
    weights[-1] = 4.0
    done = np.concatenate([[0.0], np.cumsum(weights)])
    spans = np.maximum(done[None, :] - done[:-1, None], 0)[:, :, None]
    counts = np.maximum(np.arange(num_devices + 1), 1)[None, None, :]

    def tables(number: int) -> MicroBatchTables:
        rows = np.ceil(np.ceil(256 / number) / counts)
        seconds = spans * (rows + 2) + rows * 0.3
        seconds[:, :, 256 // number + 1 :] = np.inf
        return MicroBatchTables(seconds=seconds, fixed_bytes=np.broadcast_to(spans * 4.0, seconds.shape), flight_bytes=spans * rows)

    return SearchProblem(
        num_blocks=num_blocks,
        num_devices=num_devices,
        schedule="1f1b",
        micro_batches=tuple(range(1, 33)),
        tables=tables,
        allreduce_seconds=np.broadcast_to(spans * 10 * (counts > 1), (num_blocks, num_blocks + 1, num_devices + 1)),
        memory_bytes=memory_bytes,
    )


@pytest.mark.parametrize("memory_bytes", [1e9, 400.0, 150.0, 100.0])
def test_sixty_four_blocks_on_thirty_two_devices_take_seconds(memory_bytes: float) -> None:
    problem = layered_problem(64, 32, memory_bytes)
    begin = time.perf_counter()
    solution = search(problem)
    seconds = time.perf_counter() - begin
    assert solution is not None
    assert step_seconds(problem, solution.bounds, solution.replicas, solution.num_micro_batches) == solution.step_seconds
    assert seconds < 10  # about 1 on an idle core


def test_ties_go_to_fewer_stages() -> None:
    ones = np.ones((2, 3, 3))
    tables = MicroBatchTables(seconds=ones, fixed_bytes=ones, flight_bytes=ones)
    problem = SearchProblem(
        num_blocks=2, num_devices=2, schedule="1f1b", micro_batches=(1, 2), tables=lambda _: tables,
        allreduce_seconds=0 * ones, memory_bytes=100,
    )  # fmt: skip
    assert search(problem) == Solution(bounds=(0, 2), replicas=(2,), num_micro_batches=1, step_seconds=1.0)
