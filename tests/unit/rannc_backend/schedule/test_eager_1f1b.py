"""Eager-1F1B, which is one file and one entry in the list: its programs are valid and run, and its steps are priced,
searched and shorter than those of 1F1B where messages take long.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rannc_backend.planner.search.search import search
from rannc_backend.schedule.edges import PHASES
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.message_order import message_order
from rannc_backend.schedule.orders import build_order, schedule_named
from rannc_backend.schedule.verify import verify
from tests.added_schedules import added_schedules
from tests.schedule_executor import run_program
from tests.unit.rannc_backend.planner.search.search_problems import brute_force, random_problem
from tests.unit.rannc_backend.schedule.test_chain import ChainStage, chain_step_seconds
from tests.unit.rannc_backend.schedule.test_verify import EDGES, NUM_STAGES

NAME = "eager_1f1b"


@pytest.fixture(autouse=True)
def listed() -> Iterator[None]:
    with added_schedules(eager_1f1b="tests.eager_1f1b"):
        yield


def test_its_programs_are_valid_and_run() -> None:
    assert " ".join(map(str, build_order(NAME, 2, 4)[0])) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert schedule_named(NAME).in_flight_bounds(3, 4) == (4, 3, 1)
    for phase in PHASES:
        for number in (1, 2, 5):
            programs = lower(build_order(NAME, NUM_STAGES, number), EDGES, phase, number)
            bounds = schedule_named(NAME).in_flight_bounds(NUM_STAGES, number) if phase == "train" else None
            verify(programs, EDGES, number, phase, max_in_flight=bounds)
            run_program(programs, EDGES, number, phase, number)
            message_order(programs)


def test_long_messages_are_hidden() -> None:
    stages = [
        ChainStage(forward_seconds=1.0, backward_seconds=2.0),
        ChainStage(forward_seconds=1.0, backward_seconds=2.0, message_seconds=1.0, gradient_seconds=1.0),
    ]
    eager, plain = (chain_step_seconds(stages, 8, name) for name in (NAME, "1f1b"))
    assert eager == pytest.approx(8 * 3 + 5) and plain > eager
    assert chain_step_seconds(stages[:1], 8, NAME) == chain_step_seconds(stages[:1], 8, "1f1b")


def test_the_search_finds_its_best_plan() -> None:
    for seed in range(6):
        problem = random_problem(
            seed, 4, 4, devices_per_node=2, micro_batches=(1, 3), schedules=(NAME,), style="anything",
            memory_bytes=24.0, message_scale=0.5, reduction_scale=0.5,
        )  # fmt: skip
        found = search(problem).solution
        assert (found.step_seconds if found else float("inf")) == pytest.approx(brute_force(problem))
