"""`rannc_backend.gathered`: the model whole on all ranks for a while, exactly as in one process."""

from __future__ import annotations

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case, on_plans

CASES = (
    *on_plans(
        "gathered",
        [
            ("works", "1,1"),
            ("works", "1,2,1"),
            ("changes", "1,1"),
            ("changes", "2,1"),
            ("refused", "1,1"),
        ],
        limit_seconds=120.0,
    ),
    Case(
        name="gathered-changes-zero",
        check="gathered_changes",
        world=2,
        replicas="2",
        parameters={"zero_stage": 2},
        limit_seconds=120.0,
    ),
    Case(
        name="gathered-changes-offload",
        check="gathered_changes",
        world=2,
        replicas="1,1",
        parameters={"offload": "parameters"},
        limit_seconds=120.0,
    ),
)
ONLY_IN_FULL = ("works-1,2,1", "changes-2,1", "changes-offload")


@pytest.mark.parametrize("case", cases(CASES, "gathered", ONLY_IN_FULL))
def test_gathered(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
