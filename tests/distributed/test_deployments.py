"""Deployments that are saved, loaded, edited by hand, refused, and measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(name: str, check: str, replicas: str = "", num_micro_batches: int = 2, **members: Any) -> Case:
    return Case(
        name=f"deployment-{name}",
        check=check,
        num_micro_batches=num_micro_batches,
        **{
            "model": "mlp_loss",
            "world": 2,
            "replicas": replicas,
            "limit_seconds": 240.0,
            "parameters": {},
            **members,
        },
    )


def _saved(name: str, replicas: str, **members: Any) -> Case:
    # Only the first run asks for stages; the others take what the file says.
    save = {"stage_replicas": replicas, "pipeline_num": 2}
    world = sum(map(int, replicas.split(",")))
    return _case(
        name,
        members.pop("check", "saved_and_loaded"),
        num_micro_batches=0,
        world=world,
        parameters={"save": save},
        **members,
    )


LOADED = (
    _saved("two", "1,1"),
    _saved("three", "2,1", rows=(4, 3, 5)),
    _saved("four", "1,2,1", model="long_skip_loss"),
    _saved("tied", "1,2", model="tied_embedding", rows=(4, 3, 5)),
)
ONLY_IN_FULL = {"deployment-three", "deployment-four", "deployment-measured-outside"}
CACHED = _saved("cached", "1,1", check="planned_once")
REFUSED = _saved("refused", "1,1", check="refused_deployments")
MEASURED = (
    _case("measured-1f1b", "measured_steps", "1,1", num_steps=7),
    _case("measured-fill_drain", "measured_steps", "1,1", num_steps=7, options={"schedule": "fill_drain"}),
    _case("measured-replicas", "measured_steps", "2,1", world=3, num_steps=7, model="tied_embedding"),
    _case("measured-outside", "measured_steps", "1,1", num_steps=7, model="mlp"),
    _case(
        "measured-inductor",
        "measured_steps",
        "1,1",
        num_steps=7,
        stage_compiler="inductor",
        limit_seconds=300.0,
    ),
)
MEMORY = _case(
    "memory",
    "measured_steps",
    "1,1",
    num_steps=6,
    model="gpt2",
    rows=(32, 32),
    options={"costs": "analytic", "stage_memory": "traced", "outputs": "loss"},
)


def _parameters(cases: tuple[Case, ...]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.full] if case.name in ONLY_IN_FULL else [])
        for case in cases
    ]


@pytest.mark.parametrize("case", _parameters(LOADED))
def test_loaded_and_edited_deployments_train_as_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    assert outcome.results[0]["stages"] == len(case.parameters["save"]["stage_replicas"].split(","))


@pytest.mark.parametrize("case", [pytest.param(CACHED, id=CACHED.name)])
def test_the_plan_of_an_earlier_run_is_used_and_trains_alike(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("case", [pytest.param(REFUSED, id=REFUSED.name)])
def test_wrong_deployments_are_refused_on_every_rank(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    words = {
        "bad JSON": "not JSON",
        "another graph": "another graph",
        "another world": "7 ranks and this run has 2",
        "unknown node": "ghost",
        "code": "not JSON",
        "no file": "No such file",
        "options": "partition_num asks for 5",
    }
    for result in outcome.results:
        assert set(words) <= set(result)
        for kind, word in words.items():
            assert word in result[kind], f"{kind}: {result[kind]}"


@pytest.mark.parametrize("case", _parameters(MEASURED))
def test_measured_steps_are_written_and_change_nothing(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    report = outcome.results[0]
    assert (report["num_steps"], report["world_size"]) == (2, case.world)
    assert (
        report["num_rows"] == sum(case.local_rows) and report["num_micro_batches"] == case.num_micro_batches
    )
    assert len(report["stages"]) == case.num_stages and report["comparable"]
    for stage in report["stages"]:
        assert stage["structures"] and 0 < stage["forward_seconds"] and 0 < stage["backward_seconds"]
        busy = case.num_micro_batches * min(stage["forward_seconds"], stage["backward_seconds"])
        assert busy < stage["step_seconds"] <= report["step_seconds"]
        assert 0 < stage["peak_bytes"] and 0 < stage["predicted_peak_bytes"]


@pytest.mark.parametrize("case", _parameters((MEMORY,)))
def test_memory_is_predicted_not_too_low_and_not_much_too_high(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    ratios = [stage["peak_bytes"] / stage["predicted_peak_bytes"] for stage in outcome.results[0]["stages"]]
    assert len(ratios) == 2 and all(1 / 1.2 <= ratio <= 1.0 for ratio in ratios), ratios
