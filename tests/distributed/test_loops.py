"""The loops that people run, on several ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(name=f"loops-{check}-{replicas}", replicas=replicas, world=world, check=check, **members)


def _lightning(world: int) -> Case:
    flags = (
        "--precision", "64-true", "--width", "4", "--batch", "336", "--epochs", "1", "--accumulate", "2",
        "--stages", str(min(world, 2)),
    )  # fmt: skip
    return Case(
        name=f"loops-lightning-{world}",
        world=world,
        check="lightning",
        parameters={"script": "train_lightning", "flags": flags},
        limit_seconds=200.0,
    )


def _fabric(world: int) -> Case:
    flags = ("--width", "8", "--steps", "6", "--accumulate", "2", "--stages", "2")
    return Case(
        name=f"loops-fabric-{world}",
        world=world,
        check="fabric",
        parameters={"script": "train_fabric", "flags": flags},
        limit_seconds=200.0,
    )


CASES = (
    _lightning(2),
    _lightning(4),
    _fabric(2),
    _fabric(4),
    _case("trainer_parts", "1,1", limit_seconds=200.0),
    _case("trainer_parts", "1,2", limit_seconds=200.0),
    _case("fabric_parts", "1,1"),
    _case("fabric_parts", "1,2,1"),
    _case("joined", "1,1"),
    _case("joined", "2,1"),
    _case("norms_by_name", "1,1"),
    _case("norms_by_name", "1,2,1"),
    _case("averages", "1,1"),
    _case("averages", "1,2"),
    _case("averages_by_values", "1,1"),
    _case("values_of_replicas", "2"),
    _case("replicas_apart", "2"),
    _case("copied", "1,1"),
    _case("around", "1,1"),
    _case("around", "1,2"),
    _case("in_closure", "1,1"),
    _case("in_closure", "2", options={"zero_stage": 1}),
    _case("by_name", "1,1"),
    _case("by_name", "2"),
    _case("scaled", "1,1"),
    _case("workers", "1,1"),
    _case("unfrozen", "1,1"),
    _case("dropped_beside", "1,1"),
    _case("several_models", "1,1"),
    _case("prompts", "1,1"),
    _case("prompts", "2"),
    _case("checkpointed", "1,1"),
    _case("checkpointed", "2"),
    _case("some_outputs", "1,1"),
    _case("some_outputs", "2"),
    _case("some_outputs", "2,1", num_micro_batches=2),
    _case("unused_parts", "1,1"),
    _case("unused_parts", "2"),
    _case("unused_parts", "1,2", num_micro_batches=2),
    _case("unused_parts", "3", options={"zero_stage": 1}),
    _case("unused_results", "1,1"),
    _case("unused_whole", "1,1"),
    _case("heads", "1,1"),
    _case("heads", "2"),
    _case("scaled_losses", "2"),
    _case("heads_apart", "1,1", limit_seconds=200.0),
    _case("heads_in_one_optimizer", "2", limit_seconds=200.0),
    _case("synchronized_apart", "1,1"),
    _case("chained", "1,1", limit_seconds=200.0),
    _case("chained", "2", limit_seconds=200.0),
    _case("chained", "1,2,1", limit_seconds=200.0),
)
IN_FULL = (
    "averages-1,2",
    "lightning-4",
    "fabric-4",
    "fabric_parts-1,2,1",
    "around-1,2",
    "trainer_parts-1,2",
    "joined-2,1",
    "norms_by_name-1,2,1",
    "chained-1,2,1",
)


@pytest.mark.parametrize("case", cases(CASES, "loops", IN_FULL))
def test_a_loop_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
