"""Plans in which ranks compute several stages: even over lanes, within memory, priced as they run, taken where they gain."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError, OptionValueError, PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.plan_parts import priced
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.problem import Pricer, SearchProblem, Solution
from rannc_backend.planner.search.search import search
from rannc_backend.planner.search.several_stages import (
    LaneMemory,
    _cuts,
    _with_even_lanes,
    counted_twice,
    fixed_parts,
    kept_by_budget,
    lane_plans,
    several_stages,
    step_seconds,
)
from rannc_backend.planner.settling import settle
from rannc_backend.report.tables import proof_text
from rannc_backend.schedule.orders import schedule_named
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.settings.options import Config
from tests.schedule_lists import SEVERAL_STAGES
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line, split_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

NUM_BLOCKS, ROWS, NUM_LANES = 24, 24, 3
ALL = ("1f1b", "fill_drain", "zb_h1", "list_scheduled", "interleaved", "zb_v", "v_half")


def request_of(seed: int, schedules: tuple[str, ...], **options: Any) -> PlanRequest:
    cluster = local_cpu(NUM_LANES, memory_bytes=64 * BYTES_PER_GB)
    config = Config(**{"mem_margin": 0.0, "pipeline_num": 6, **options})
    pricer = AnalyticPricer(device=cluster.device)
    return PlanRequest.of(split_line(seed, NUM_BLOCKS), config, cluster, pricer, ROWS, schedules, None)


def problem_of(seed: int, schedules: tuple[str, ...] = ALL, **options: Any) -> SearchProblem:
    request = request_of(seed, schedules, **options)
    return request.problem(request.costs())


def plan_of(
    seed: int, schedules: tuple[str, ...], limit_bytes: float = 64 * BYTES_PER_GB, **options: Any
) -> Plan:
    return plan_blocks(
        split_line(seed, NUM_BLOCKS),
        Config(mem_margin=0.0, pipeline_num=6, **options),
        cluster=local_cpu(NUM_LANES, memory_bytes=int(limit_bytes)),
        batch_rows=ROWS,
        schedules=schedules,
        fingerprint="f" * 64,
    )


@pytest.mark.parametrize("name", SEVERAL_STAGES)
@pytest.mark.parametrize("seed", range(4))
def test_lanes_keep_their_ranks_and_share_the_work(name: str, seed: int) -> None:
    problem = problem_of(seed, (name,), replica_num=1, partition_num=2 * NUM_LANES)
    base = search(problem).solution
    assert base is not None and base.num_stages == NUM_LANES
    made = several_stages(problem, base, schedule_named(name))
    assert made is not None and made.base == base and made.num_ranks == base.num_ranks
    lanes = schedule_named(name).lanes(made.num_stages)
    for number, lane in enumerate(lanes):
        assert {made.ranks(stage) for stage in lane} == {base.ranks(number)}
    assert made.step_seconds == step_seconds(problem, made, schedule_named(name))
    again = priced(problem, made)
    assert again is not None and again.step_seconds == made.step_seconds
    # No lane has more than its share, but for the blocks at the ends of its stages.
    tables = problem.tables(made.num_micro_batches, 1)
    blocks = np.arange(NUM_BLOCKS)
    work = tables.forward[blocks, 0, 0] + tables.backward[0, blocks, 0, 0]
    shares = [sum(work[made.bounds[s] : made.bounds[s + 1]].sum() for s in lane) for lane in lanes]
    assert max(shares) <= work.sum() / len(lanes) + 2 * work.max()


@pytest.mark.parametrize("name", SEVERAL_STAGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_takes_as_long_as_its_simulation_says(name: str, seed: int) -> None:
    plan = plan_of(seed, (name,), partition_num=2 * NUM_LANES)
    assert plan.schedule == name and plan.num_stages == 2 * NUM_LANES
    assert plan.lanes == schedule_named(name).lanes(plan.num_stages)
    simulated = simulate_plan(plan)
    assert simulated.step_seconds == pytest.approx(plan.predicted_step_seconds, rel=1e-4)
    for stage, found in zip(plan.stages, simulated.stages, strict=True):
        assert found.peak_bytes == stage.predicted.peak_bytes
        assert found.idle_share == pytest.approx(stage.predicted.idle_share, abs=1e-3)
    assert plan.from_json(plan.to_json()) == plan
    assert proof_text(plan).startswith("not proven, as ranks have several stages")
    with pytest.raises(PlanError, match="for several stages on each rank, others than this plan has"):
        simulate_plan(plan, "zb_v" if name == "interleaved" else "interleaved")
    assert simulate_plan(plan, "1f1b").step_seconds > 0


@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_a_plan_stays_within_the_memory_of_a_rank(name: str) -> None:
    roomy = plan_of(1, (name,), partition_num=2 * NUM_LANES)
    needed = max(roomy.lane_peak_bytes(lane[0]) for lane in roomy.lanes)
    tight = plan_of(1, (name,), limit_bytes=needed * 0.97, partition_num=2 * NUM_LANES)
    assert (
        tight.schedule != name or max(tight.lane_peak_bytes(lane[0]) for lane in tight.lanes) <= needed * 0.97
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_workspace_of_a_rank_counts_once(seed: int) -> None:
    """The search, the plan and its simulation agree on what the stages of a rank need together."""
    request = request_of(seed, ("interleaved",), partition_num=2 * NUM_LANES)
    costs = request.costs()
    for budget, begin, length, replicas in itertools.product(range(3), (0, 7), (1, 5), (1, 2)):
        memory = costs.memory(begin, begin + length, costs.budgets[budget], 6, replicas)
        found = costs.workspace_bytes(6, begin, begin + length, replicas)
        assert found.shape == (len(costs.budgets),)
        assert found[budget] == pytest.approx(memory.workspace)
    plan = plan_of(seed, ("interleaved",), partition_num=2 * NUM_LANES)
    for lane in plan.lanes:
        own = [plan.stages[index].predicted for index in lane]
        workspaces = [cost.workspace_bytes for cost in own]
        others = sum(cost.peak_bytes - cost.workspace_bytes for cost in own)
        assert plan.lane_peak_bytes(lane[0]) == others + max(workspaces)
        assert simulate_plan(plan).lane_peak_bytes(lane) == others + max(workspaces)
    needed = plan.peak_bytes
    alone = max(sum(plan.stages[index].predicted.peak_bytes for index in lane) for lane in plan.lanes)
    assert needed < alone
    # So much is enough for it (the search counts a message more), and nothing has to be computed again.
    limit = needed + (alone - needed) // 4
    again = plan_of(seed, ("interleaved",), limit_bytes=limit, partition_num=2 * NUM_LANES)
    assert [stage.recompute for stage in again.stages] == [stage.recompute for stage in plan.stages]
    assert again.schedule == "interleaved" and again.peak_bytes <= limit


@pytest.mark.parametrize("per_rank", [2, 3, 4])
def test_the_number_of_stages_on_a_rank_can_be_told(per_rank: int) -> None:
    plan = plan_of(0, ALL, stages_per_rank=per_rank)
    assert {len(lane) for lane in plan.lanes} == {per_rank} and plan.schedule in SEVERAL_STAGES
    assert simulate_plan(plan).step_seconds == pytest.approx(plan.predicted_step_seconds, rel=1e-4)
    plan = plan_of(0, ("interleaved",), stages_per_rank=per_rank, stage_replicas=",".join("21" * per_rank))
    assert plan.num_stages == 2 * per_rank and plan.stage_replicas == (2, 1) * per_rank
    assert all(len(lane) == 1 for lane in plan_of(0, ALL, stages_per_rank=1).lanes)


def test_a_number_that_no_schedule_has_is_an_error() -> None:
    for schedules in (("zb_v",), ("1f1b",), ("list_scheduled", "fill_drain")):
        with pytest.raises(OptionValueError, match=f"{' or '.join(schedules)} can have on a rank"):
            plan_of(0, schedules, stages_per_rank=3, schedule=schedules[-1])


def test_several_stages_on_a_rank_without_a_loss_are_told_what_they_need() -> None:
    for schedule in ("auto", "interleaved"):
        with pytest.raises(OptionValueError, match="compute the loss in the model's forward"):
            plan_of(0, ("fill_drain",), stages_per_rank=2, schedule=schedule)


@pytest.mark.parametrize("seed", range(4))
def test_budgets_of_a_lane_are_the_fastest_that_fit(seed: int) -> None:
    """Where all combinations are tried; changing one stage after the other comes near to that."""
    generator = np.random.default_rng(seed)
    num_budgets, num_stages = 4, 3
    memory = LaneMemory(
        counts=generator.integers(0, 4, (20, num_stages, 2)).astype(float),
        seconds=np.sort(generator.random((num_stages, num_budgets)), axis=1),
        fixed=generator.random((num_stages, num_budgets)),
        workspace=generator.random((num_stages, num_budgets)),
        flight=np.sort(generator.random((num_stages, num_budgets)), axis=1)[:, ::-1],
        kept=np.zeros((num_stages, num_budgets)),
    )
    limit = float(np.median([memory.num_bytes(each) for each in itertools.product(range(4), repeat=3)]))
    best = memory.fastest(limit)
    assert best is not None and memory.num_bytes(best) <= limit
    for each in itertools.product(range(num_budgets), repeat=num_stages):
        assert memory.num_bytes(each) > limit or memory.num_seconds(each) >= memory.num_seconds(best)
    near = memory.step_by_step(limit)
    assert near is not None and memory.num_bytes(near) <= limit
    assert memory.num_seconds(best) <= memory.num_seconds(near) <= memory.num_seconds(best) + 1.0
    assert memory.fastest(0.0) is None and memory.step_by_step(0.0) is None


def test_other_lanes_than_those_found_are_tried() -> None:
    """More of the memory, or fewer stages to fill, may be worth it."""
    problem = problem_of(2, pipeline_num=0, max_pipeline=6)
    found = search(problem).solution
    assert found is not None
    plans = lane_plans(replace(problem, only_lane_schedules=True), found)
    assert [plan.step_seconds for plan in plans] == sorted(plan.step_seconds for plan in plans)
    shapes = {(len(plan.lanes), plan.num_micro_batches, len(plan.lanes[0])) for plan in plans}
    assert len({lanes for lanes, _, _ in shapes}) > 1 and len({per_lane for _, _, per_lane in shapes}) > 1
    for plan in plans:
        again = priced(problem, plan)
        assert again is not None and again.step_seconds == pytest.approx(plan.step_seconds)


def test_numbers_by_stage_are_those_of_lanes() -> None:
    plan = plan_of(0, ("interleaved",), stage_replicas="2,1,2,1")
    assert plan.stage_replicas == (2, 1, 2, 1) and plan.lanes == ((0, 2), (1, 3))
    plan = plan_of(0, ("zb_v",), stage_replicas="2,1,1,2")
    assert plan.lanes == ((0, 3), (1, 2))
    with pytest.raises(InfeasiblePlanError, match="stages 0 and 2, 1 and 3 have the same ranks"):
        plan_of(0, ("interleaved",), stage_replicas="2,1,1,2")
    with pytest.raises(InfeasiblePlanError, match="2 stages on each rank, and 3 stages are asked for"):
        plan_of(0, ("interleaved",), partition_num=3)


def test_too_few_blocks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    graph = random_line(0, 3)
    with caplog.at_level(logging.WARNING):
        plan = plan_blocks(
            graph,
            Config(mem_margin=0.0, pipeline_num=2, partition_num=4),
            cluster=local_cpu(2, memory_bytes=64 * BYTES_PER_GB),
            batch_rows=8,
            schedules=("interleaved",),
            fingerprint="f" * 64,
        )
    assert plan.num_stages == 2 and plan.schedule != "interleaved"
    assert "schedule interleaved needs two stages on each rank" in caplog.text


@pytest.mark.parametrize("seed", range(6))
def test_where_the_search_may_choose_it_takes_what_is_fastest(seed: int) -> None:
    problem = problem_of(seed)
    found = search(problem).solution
    assert found is not None
    taken = settle(problem, found, None)
    without = settle(replace(problem, lane_schedules=()), found, None)
    assert taken.step_seconds <= without.step_seconds
    assert taken.has_several_stages or taken == without


def test_where_numbers_of_stages_are_given_ranks_have_one() -> None:
    assert problem_of(0, partition_num=3).lane_schedules == ()
    assert problem_of(0).lane_schedules == SEVERAL_STAGES


@pytest.mark.parametrize("starts", [(1, 2, 3), (21, 22, 23), (1, 2, 22, 23), (3, 7, 8, 12, 20)], ids=str)
def test_every_module_that_must_start_a_stage_moves_a_cut_of_its_own(starts: tuple[int, ...]) -> None:
    problem = replace(problem_of(0, ("zb_v",)), lane_starts=starts)
    base = search(replace(problem, num_stages=NUM_LANES)).solution
    assert base is not None
    made = several_stages(problem, base, schedule_named("zb_v"))
    assert made is not None and set(starts) <= set(made.bounds)
    # More of them than a plan has cuts cannot be had.
    many = replace(problem, lane_starts=tuple(range(1, 2 * NUM_LANES + 1)))
    assert several_stages(many, base, schedule_named("zb_v")) is None


@pytest.mark.parametrize("heavy", [0, 3, 5])
def test_even_stages_have_a_block_each_wherever_the_work_is(heavy: int) -> None:
    """A block that is far more than a stage's share leaves the others with a block each."""
    work = np.ones((6, 1, 1))
    work[heavy] = 100.0
    tables = SimpleNamespace(replicas=np.array([1]), forward=work, backward=work[None])
    pricer = SimpleNamespace(
        num_micro_batches=4,
        problem=SimpleNamespace(num_blocks=6, lane_starts=(), lane_legal_starts=None),
        tables=tables,
    )
    for bounds in _cuts(cast("Pricer", pricer), ((0, 2), (1, 3)), (1, 1, 1, 1)):
        assert bounds[0] == 0 and bounds[-1] == 6
        assert all(end > begin for begin, end in itertools.pairwise(bounds))


def test_small_last_blocks_join_the_last_stage() -> None:
    """Twelve stages on four lanes: as even shares are rounded, one would have two of the large blocks. A second one in the
    last lane would be as fast for many micro-batches, but fill the lanes later.
    """
    lanes = schedule_named("interleaved").with_stages_per_lane(3).lanes(12)  # type: ignore[union-attr]
    sums = np.concatenate([[0.0], np.cumsum([1.0] * 12 + [0.01, 0.34])])
    uneven = np.array([*range(9), 10, 11, 12, 14])
    found = _with_even_lanes(uneven, lanes, np.ones(12, dtype=np.int64), sums, 8)
    assert found == (*range(12), 14)


@pytest.mark.parametrize("seed", range(20))
def test_even_lanes_are_never_slower(seed: int) -> None:
    random = np.random.default_rng(seed)
    lanes = schedule_named("interleaved").lanes(8)
    work = random.uniform(0.1, 3.0, size=20)
    sums = np.concatenate([[0.0], np.cumsum(work)])
    cuts = np.array([0, *np.sort(random.choice(np.arange(1, 20), 7, replace=False)), 20])
    found = np.array(_with_even_lanes(cuts, lanes, np.ones(8, dtype=np.int64), sums, 6))
    assert found[0] == 0 and found[-1] == 20 and (np.diff(found) >= 1).all()

    def seconds(bounds: Any) -> float:
        stages = np.diff(sums[bounds])
        return float(6 * max(stages[list(lane)].sum() for lane in lanes) + 3 * stages.max())

    assert seconds(found) <= seconds(cuts) * (1 + 1e-9)


def test_what_a_lane_shares_is_in_its_account_once() -> None:
    """The search and the plan take the same from the stages of a rank, and a stage alone on its ranks shares nothing."""
    request = request_of(2, ("interleaved",), partition_num=2 * NUM_LANES)
    costs = request.costs()
    problem = request.problem(costs)
    base = search(problem).solution
    assert base is not None and problem.shared is not None
    assert counted_twice(problem.shared, base, 1) == (0.0, 0.0)
    made = several_stages(problem, base, schedule_named("interleaved"))
    assert made is not None
    shared = replace(
        problem.shared,
        cluster=replace(problem.cluster, device=replace(problem.cluster.device, communicator_bytes=10**7)),
    )
    # The middle lane: two of all ranks and one for each neighbour, in the account of its first stage.
    (_, first), (_, second) = (counted_twice(shared, made, stage) for stage in (1, 1 + NUM_LANES))
    assert first == 0.0 and second == shared.communicators(*made.bounds[4:6], 1)
    least = step_parts(replace(problem, shared=shared), made)
    assert least == pytest.approx(
        [
            own - twice
            for own, twice in zip(
                step_parts(replace(problem, shared=None), made), (first, second), strict=True
            )
        ]
    )


def test_half_of_the_memory_is_used_where_not_all_can_be_kept() -> None:
    """v_half is taken where it is faster with less memory, and not tried where all can be kept."""

    def plan(share: float, *more: str) -> Plan:
        return plan_blocks(
            split_line(0, NUM_BLOCKS),
            Config(mem_margin=0.0, pipeline_num=16, replica_num=1),
            cluster=local_cpu(4, memory_bytes=int(share * needed)),
            batch_rows=16,
            schedules=("1f1b", "zb_v", *more),
            fingerprint="f" * 64,
        )

    needed = 64.0 * BYTES_PER_GB
    enough = plan(1.0, "v_half")
    assert enough.schedule == "zb_v" and enough.to_json() == plan(1.0).to_json()
    needed = max(enough.lane_peak_bytes(stage) for stage in range(enough.num_stages))
    less, without = plan(0.9, "v_half"), plan(0.9)
    assert (less.schedule, without.schedule) == ("v_half", "1f1b")
    assert less.predicted_step_seconds < 0.98 * without.predicted_step_seconds
    assert simulate_plan(less).step_seconds == pytest.approx(less.predicted_step_seconds, rel=1e-4)
    assert max(less.lane_peak_bytes(stage) for stage in range(less.num_stages)) <= 0.9 * needed


def test_a_first_stage_keeps_what_is_in_flight_and_the_gradients_that_have_come() -> None:
    problem = problem_of(2, ("interleaved",), partition_num=2 * NUM_LANES)
    base = search(problem).solution
    assert base is not None
    made = several_stages(problem, base, schedule_named("interleaved"))
    assert made is not None
    _assert_kept(problem, made)
    for bounds in (base.bounds[:3], base.bounds[:2]):
        _assert_kept(problem, replace(base, bounds=bounds, replicas=base.replicas[: len(bounds) - 1]))


def _assert_kept(problem: SearchProblem, made: Solution) -> None:
    pricer = Pricer(problem, made.num_micro_batches, made.schedule, made.longest_stage)
    tables = pricer.tables
    places = [
        (
            made.bounds[x],
            made.bounds[x + 1] - made.bounds[x] - 1,
            int(np.flatnonzero(tables.replicas == made.replicas[x])[0]),
        )
        for x in range(made.num_stages)
    ]
    came = [*(float(tables.gradient_bytes[place]) for place in places), 0.0]
    assert len(set(came[1:3])) == len(came[1:3])
    assert kept_by_budget(pricer, made, 0) == [
        float(num_bytes) + came[1] for num_bytes in tables.flight_bytes[(slice(None), *places[0])]
    ]
    for place, stage in zip(places[1:], range(1, made.num_stages), strict=True):
        assert set(kept_by_budget(pricer, made, stage)) == {float(tables.kept_bytes[place])}


def step_parts(problem: SearchProblem, made: Any) -> list[float]:
    """What the two stages of the middle lane need whatever is in flight."""
    sizes = fixed_parts(Pricer(problem, made.num_micro_batches, made.schedule, made.longest_stage), made)
    return [sizes[stage][0] for stage in (1, 1 + NUM_LANES)]
