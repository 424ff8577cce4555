"""Under limits of bubble and balance the search equals brute force, which asks the simulator what each plan idles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.planner.search.limits import PipelineLimits
from rannc_backend.planner.search.moves import honours
from rannc_backend.planner.search.problem import Pricer, SearchProblem, plans_step_seconds, plans_terms
from rannc_backend.planner.search.search import search
from rannc_backend.schedule.edges import chain_edges
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import schedule_named
from rannc_backend.schedule.plan_simulation import PipelineShape
from rannc_backend.schedule.simulator import StageSeconds, simulate
from tests.unit.rannc_backend.planner.search.search_problems import all_shapes, problems

NO_LIMITS = PipelineLimits()
# None that a plan of whole numbers meets exactly.
LIMITS = st.builds(
    PipelineLimits,
    bubble=st.sampled_from([0.0, 0.0937, 0.2171, 0.3813, 0.5519]),
    balance=st.sampled_from([0.0, 0.2371, 0.5237, 0.8111, 0.9613]),
)


def bubble_of(schedule_name: str, number: int, stages: list[StageSeconds], replicas: list[int]) -> float:
    """What ranks idle in a run without messages and reductions."""
    order = schedule_named(schedule_name).order(len(stages), number)
    step = simulate(lower(order, chain_edges(len(stages)), "train", number), stages, {})
    if not step.makespan_seconds:
        return 0.0
    busy = sum(count * seconds for count, seconds in zip(replicas, step.busy_seconds, strict=True))
    return 1 - busy / (sum(replicas) * step.makespan_seconds)


def keeps(pricer: Pricer, limits: PipelineLimits, plan: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bool:
    stages = [
        StageSeconds(
            forward=float(terms.forward[0]),
            backward=float(terms.backward[0]),
            weight=float(min(terms.weight[0], terms.backward[0])),
        )
        for terms in plans_terms(pricer, *(part[None] for part in plan))
    ]
    seconds = [stage.forward + stage.backward for stage in stages]
    if min(seconds) < limits.balance * max(seconds):
        return False
    if not limits.bubble or len(stages) == 1:
        return True
    number = pricer.num_micro_batches
    documented = (len(stages) - 1) / (number + len(stages) - 1)
    if pricer.schedule in ("1f1b", "fill_drain") and documented > limits.bubble:
        return False
    replicas = pricer.tables.replicas[plan[1]].tolist()
    return bubble_of(pricer.schedule, number, stages, replicas) <= limits.bubble


def brute_force(problem: SearchProblem, limits: PipelineLimits) -> float:
    """The least step over every stage-major plan that keeps the limits, in order of their steps."""
    best = np.inf
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            pricer = Pricer(problem, number, schedule)
            counts = tuple(pricer.tables.replicas.tolist())
            for num_stages in range(1, min(problem.num_blocks, problem.num_devices) + 1):
                shapes = all_shapes(
                    problem.num_blocks,
                    counts,
                    problem.num_devices,
                    problem.cluster.devices_per_node,
                    num_stages,
                )
                if not len(shapes[0]):
                    continue
                steps = plans_step_seconds(pricer, *shapes)
                for index in np.argsort(steps, kind="stable"):
                    plan = tuple(part[index] for part in shapes)
                    if steps[index] >= best:
                        break
                    replicas = tuple(pricer.tables.replicas[plan[1]].tolist())
                    if honours(problem, plan[0].tolist(), replicas) and keeps(pricer, limits, plan):
                        best = float(steps[index])
                        break
    return best


def check(problem: SearchProblem, limits: PipelineLimits) -> None:
    # In one node every plan is stage-major.
    problem = replace(problem, cluster=replace(problem.cluster, devices_per_node=64))
    expected = brute_force(problem, limits)
    result = search(replace(problem, limits=limits))
    assert (result.solution is None) == (expected == np.inf)
    if result.solution is not None:
        assert result.solution.step_seconds == pytest.approx(expected, rel=1e-8, abs=1e-12)
        assert result.proven_gap == 0.0


@settings(max_examples=150, deadline=None)
@given(problem=problems(max_blocks=6, max_devices=4), limits=LIMITS)
def test_the_search_under_limits_equals_brute_force(problem: SearchProblem, limits: PipelineLimits) -> None:
    check(problem, limits)


@pytest.mark.full
@settings(max_examples=3000, deadline=None)
@given(problem=problems(max_blocks=8, max_devices=5), limits=LIMITS)
def test_the_search_under_limits_equals_brute_force_at_length(
    problem: SearchProblem, limits: PipelineLimits
) -> None:
    check(problem, limits)


@pytest.mark.parametrize(
    ("number", "most"), [(1, 1), (3, 1), (4, 2), (8, 3), (16, 5), (32, 9)], ids=lambda value: str(value)
)
def test_numbers_of_stages_are_those_that_autodist_allows_at_its_default(number: int, most: int) -> None:
    limits = PipelineLimits(bubble=0.2)
    for name in ("1f1b", "fill_drain"):
        assert limits.most_stages(schedule_named(name), number) == most
    for name in ("zb_h1", "interleaved", "zb_v", "v_half", "list_scheduled"):
        assert limits.most_stages(schedule_named(name), number) == np.inf
    assert NO_LIMITS.most_stages(schedule_named("1f1b"), number) == np.inf


@pytest.mark.parametrize("name", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(("number", "num_stages"), [(4, 2), (8, 3), (16, 5), (5, 4)])
def test_equal_stages_idle_as_the_formula_says(name: str, number: int, num_stages: int) -> None:
    share = (num_stages - 1) / (number + num_stages - 1)
    forward = np.ones((1, num_stages))
    replicas = np.ones((1, num_stages), dtype=np.int64)
    for bubble, allowed in ((share, True), (share - 1e-6, False)):
        limits = PipelineLimits(bubble=bubble)
        found = limits.allow(schedule_named(name), number, forward, 2 * forward, 0 * forward, replicas)
        assert found.tolist() == [allowed]
    stages = [StageSeconds(forward=1.0, backward=2.0)] * num_stages
    assert bubble_of(name, number, stages, [1] * num_stages) == pytest.approx(share)


def test_split_backwards_idle_less_and_may_have_more_stages() -> None:
    """With 3 equal stages 1F1B idles 2 of 8 + 2 micro-batches' time, ZB-H1 about a third of that."""
    ones = np.ones((1, 3))
    replicas = np.ones((1, 3), dtype=np.int64)
    limits = PipelineLimits(bubble=0.12)
    allowed = {
        name: bool(limits.allow(schedule_named(name), 8, ones, 2 * ones, ones, replicas)[0])
        for name in ("1f1b", "zb_h1")
    }
    assert allowed == {"1f1b": False, "zb_h1": True}


def test_a_balance_is_the_fastest_over_the_slowest_stage() -> None:
    forward = np.array([[1.0, 2.0, 2.0], [1.0, 1.9, 1.0], [1.0, 1.0, 1.0]])
    replicas = np.ones((3, 3), dtype=np.int64)
    for balance, allowed in (
        (0.0, [True] * 3),
        (0.5, [True] * 3),
        (0.51, [False, True, True]),
        (0.99, [False, False, True]),
    ):
        limits = PipelineLimits(balance=balance)
        found = limits.allow(schedule_named("1f1b"), 4, forward, 2 * forward, 0 * forward, replicas)
        assert found.tolist() == allowed


def test_words_name_the_limit_that_is_not_kept() -> None:
    limits = PipelineLimits(bubble=0.2, balance=0.5)
    f1b, lanes = schedule_named("1f1b"), ((0,), (1,), (2,))

    def words(bubble: float, balance: float, number: int = 8) -> str:
        return limits.broken_by(PipelineShape(bubble, balance), f1b, lanes, number)

    assert words(0.2, 0.5) == ""
    assert NO_LIMITS.broken_by(PipelineShape(0.9, 0.1), f1b, lanes, 1) == ""
    assert "max_pipeline_bubble_ratio allows 0.2" in words(0.3, 0.5)
    # Two ranks are a pipeline too, one is none, whatever it is said to idle.
    for few, is_allowed in ((((0,), (1,)), False), (((0, 1),), True)):
        assert (limits.broken_by(PipelineShape(0.3, 0.5), f1b, few, 8) == "") == is_allowed
    assert "max_pipeline_unbalance_ratio asks for 0.5" in words(0.3, 0.4)
    # Uneven stages may idle a little less than equal ones; the documented number of stages holds all the same.
    assert "3 equal stages idle for 0.222" in words(0.19, 0.5, number=7)
