"""Where ranks of stages are wanted: pipelines within nodes, or the replicas of stages together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.problem import Placement, SearchProblem
from rannc_backend.planner.search.search import search
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.search.search_problems import make_cluster, random_problem


def _problem(devices_per_node: int = 4, **wishes: object) -> SearchProblem:
    return random_problem(
        3, 16, 8, devices_per_node=devices_per_node, micro_batches=(4,), schedules=("1f1b",), style="layers",
        memory_bytes=1e9, message_scale=0.05, reduction_scale=0.1, **wishes,
    )  # fmt: skip


def _found(problem: SearchProblem, placement: Placement) -> tuple[Placement, list[tuple[int, ...]]]:
    limits = PipelineLimits.of(Config(placement=placement))
    solution = search(replace(problem, limits=limits)).solution
    return solution.placement, [solution.ranks(stage) for stage in range(solution.num_stages)]


@pytest.mark.parametrize("placement", ["replica_major", "stage_major"])
def test_the_placement_is_the_one_that_is_wanted(placement: Placement) -> None:
    found, ranks = _found(_problem(num_stages=2, replicas=4), placement)
    assert found == placement
    pipelines = [{rank // 4 for rank in pair} for pair in zip(*ranks, strict=True)]
    assert all(len(nodes) == (1 if placement == "replica_major" else 2) for nodes in pipelines)


@pytest.mark.parametrize(
    ("messages", "reductions", "faster"), [(5.0, 0.0, "replica_major"), (0.0, 5.0, "stage_major")]
)
def test_what_is_wanted_counts_against_the_links(
    messages: float, reductions: float, faster: Placement
) -> None:
    problem = random_problem(
        3, 16, 8, devices_per_node=4, micro_batches=(4,), schedules=("1f1b",), style="layers",
        memory_bytes=1e9, message_scale=messages, reduction_scale=reductions, num_stages=2, replicas=4,
    )  # fmt: skip
    problem = replace(problem, cluster=make_cluster(8, 4, (0.0, 100.0), (0.0, 1.0)))
    assert _found(problem, "auto")[0] == faster
    other: Placement = "stage_major" if faster == "replica_major" else "replica_major"
    assert _found(problem, other)[0] == other


@pytest.mark.parametrize(
    "problem", [_problem(8), _problem(1), _problem(num_stages=3), _problem(num_stages=8)]
)
def test_where_there_is_no_such_placement_the_other_is_taken(problem: SearchProblem) -> None:
    assert _found(problem, "replica_major")[0] == "stage_major"
