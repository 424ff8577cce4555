"""Option offload: equal to one process, with parameters, gradients and optimizer state on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, name: str = "", **members: Any) -> Case:
    options = {"offload": "parameters"} | members.pop("options", {})
    if "," in replicas:
        options["stage_starts"] = "second"  # so that both stages have parameters, and share some
    return Case(
        name=f"offload-{name or check}-{replicas}-{'-'.join(map(str, list(options.values())[1:]))}",
        check=check,
        replicas=replicas,
        world=sum(map(int, replicas.split(","))),
        num_micro_batches=2,
        options=options,
        limit_seconds=120,
        **members,
    )


def _optimizers(name: str, replicas: str, **options: Any) -> Case:
    return _case("zero_optimizers", replicas, name, parameters={"optimizer": name}, options=options)


CASES = (
    _optimizers("adamw", "1"),
    _optimizers("sgd", "2", bucket_mb=0.0001),
    _optimizers("adamw", "2,2", zero_stage=2),
    _optimizers("sgd", "1,1", schedule="fill_drain"),
    _optimizers("muon", "2,2", sync_allreduce=True),
    _optimizers("adafactor", "2,2", zero_stage=1, num_apply_group=2),
    _case("zero_scaled", "1,1"),
    _case("zero_hooks", "1,1"),
    _case("zero_penalty", "2,2"),
    _case("zero_delayed", "2,2"),
    _case("zero_delayed", "2", options={"zero_stage": 1}),
    _case("zero_between", "1,1"),
    _case("offload_pools", "1"),
    _case("offload_pools", "2,2"),
    _case("offload_pools", "2,2", options={"zero_stage": 2}),
    _case("offload_pools", "1,1", options={"schedule": "fill_drain"}),
    _case("offload_changes", "1,1"),
    _case("offload_changes", "2,2", options={"schedule": "fill_drain"}),
    _case("offload_held_graph", "1,1", parameters={"schedule": "1f1b"}),
    _case("offload_held_graph", "1,1", "held_graph_deferred", parameters={"schedule": "fill_drain"}),
)


def _parameters(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("offload-")) for case in cases]


@pytest.mark.parametrize("case", _parameters(CASES))
def test_offload(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
