"""Option offload: equal to one process, with parameters, gradients and optimizer state on the host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, name: str = "", **members: Any) -> Case:
    options = {"offload": "parameters"} | members.pop("options", {})
    if "," in replicas and check.startswith("zero_"):
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
    _optimizers("adamw", "2"),
    _optimizers("sgd", "1,1"),
    _optimizers("adamw", "2,2", zero_stage=2),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.removeprefix("offload-")) for case in CASES]
)
def test_offload(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
