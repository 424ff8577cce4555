"""A schedule that is one file and one entry in the list works everywhere; so does one that states no
bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rannc_backend.ir.plan import Plan
from rannc_backend.planner.search.search import search
from rannc_backend.report.page import plan_page
from rannc_backend.schedule.description import Count, Order, Schedule
from rannc_backend.schedule.edges import PHASES
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.message_order import message_order
from rannc_backend.schedule.orders import build_order, schedule_named, schedule_names
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.schedule.verify import verify
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import choices_of
from tests.added_schedules import added_schedules
from tests.schedule_executor import run_program
from tests.unit.rannc_backend.ir.sample_plans import replaced, sample_plan
from tests.unit.rannc_backend.planner.search.search_problems import brute_force, random_problem
from tests.unit.rannc_backend.planner.test_planner import make_plan
from tests.unit.rannc_backend.report.test_text import run, squeezed, written
from tests.unit.rannc_backend.schedule.test_chain import ChainStage, chain_step_seconds
from tests.unit.rannc_backend.schedule.test_verify import EDGES, NUM_STAGES

ADDED, PLAIN = "reversed_gpipe", "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Schedule):
    """1F1B that says no more of itself than a schedule must."""

    def order(self, num_stages: int, num_micro_batches: int) -> Order:
        return schedule_named("1f1b").order(num_stages, num_micro_batches)

    def in_flight(self, num_stages_to_end: Count, num_micro_batches: int) -> Count:
        return schedule_named("1f1b").in_flight(num_stages_to_end, num_micro_batches)


SCHEDULE = Plain(name=PLAIN, eager_backward=True)


@pytest.fixture(autouse=True)
def listed() -> Iterator[None]:
    with added_schedules(reversed_gpipe="tests.reversed_gpipe", plain=__name__):
        yield


def test_its_programs_are_valid_and_run() -> None:
    assert schedule_names() == (
        "1f1b",
        "fill_drain",
        "zb_h1",
        "list_scheduled",
        "interleaved",
        "zb_v",
        "v_half",
        ADDED,
        PLAIN,
    )
    assert " ".join(map(str, build_order(ADDED, 2, 3)[1])) == "1F0 1F1 1F2 1B2 1B1 1B0"
    assert schedule_named(ADDED).in_flight_bounds(2, 3) == (3, 3)
    for phase in PHASES:
        for number in (1, 2, 5):
            programs = lower(build_order(ADDED, NUM_STAGES, number), EDGES, phase, number)
            bounds = schedule_named(ADDED).in_flight_bounds(NUM_STAGES, number)
            verify(programs, EDGES, number, phase, max_in_flight=bounds)
            run_program(programs, EDGES, number, phase, number)
            message_order(programs)


@pytest.mark.parametrize(("name", "twin"), [(ADDED, "fill_drain"), (PLAIN, "1f1b")])
def test_its_steps_are_priced_and_searched(name: str, twin: str) -> None:
    stages = [
        ChainStage(forward_seconds=2.0, backward_seconds=3.0, allreduce_seconds=4.0, num_buckets=2),
        ChainStage(forward_seconds=1.0, backward_seconds=5.0, message_seconds=0.5, gradient_seconds=0.25),
        ChainStage(forward_seconds=3.0, backward_seconds=1.0, message_seconds=7.0),
    ]
    for number in (1, 2, 3, 8):
        expected = chain_step_seconds(stages, number, twin)
        assert chain_step_seconds(stages, number, name) == pytest.approx(expected, rel=1e-12)
    for seed in range(6):
        problem = random_problem(
            seed, 4, 4, devices_per_node=2, micro_batches=(1, 3), schedules=(name,), style="anything",
            memory_bytes=24.0, message_scale=0.5, reduction_scale=0.5,
        )  # fmt: skip
        found = search(problem).solution
        assert (found.step_seconds if found else float("inf")) == pytest.approx(brute_force(problem))


def test_the_planner_takes_it_where_it_is_wished_for() -> None:
    for model in ("chain", "penalized"):
        plan = make_plan(model, 2, schedule=ADDED, partition_num=2, pipeline_num=4)
        twin = make_plan(model, 2, schedule="gpipe", partition_num=2, pipeline_num=4)
        assert (plan.schedule, twin.schedule) == (ADDED, "fill_drain")
        assert plan.predicted_step_seconds == twin.predicted_step_seconds
        assert Plan.from_json(plan.to_json()) == plan
    assert make_plan("chain", 2, schedule=PLAIN).schedule != PLAIN, "the model returns no loss"
    assert choices_of("schedule") == ["auto", *schedule_names()] and Config(schedule=ADDED).schedule == ADDED


def test_people_are_shown_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replaced(sample_plan(), schedule=ADDED)
    path = written(tmp_path, plan)
    assert run("simulate", path, "--schedule", "gpipe") == run("simulate", path, "--schedule", ADDED) == 0
    assert run("program", path, "--rank", "0") == 0
    out = squeezed(capsys.readouterr().out)
    assert f"{ADDED} 8 " in out and "fill_drain 8 " in out and "0F7 " in out
    assert out.index("0B7") < out.index("0B6") < out.index("0B0")
    assert ADDED in plan_page(plan)
    spans = [span.micro_batch for span in simulate_plan(plan).stages[0].spans if span.kind == "backward"]
    assert spans == [7, 6, 5, 4, 3, 2, 1, 0]
