"""Models that Dynamo refuses train exactly, captured by a run of their forward."""

from __future__ import annotations

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case, on_plans

CASES = on_plans(
    "nonstrict",
    [
        *(("models", "1,1"), ("models", "2"), ("models", "1,2,1"), ("changes", "1,1"), ("refusals", "1,1")),
        *(("kept", "1,1"), ("kept", "2"), ("kept", "1,1,1,1")),
        *(("backwards", "1,1"), ("backwards", "2")),
        *(("writing", "1,1"), ("writing", "2"), ("writing", "1,1,1,1")),
        *(("dims", "1,1"), ("dims", "2"), ("dims", "1,2,1")),
        *(("attributes", "1,1"), ("attributes", "2")),
    ],
    limit_seconds=180.0,
)


@pytest.mark.parametrize(
    "case",
    cases(
        CASES,
        "nonstrict",
        (
            "models-2",
            "models-1,2,1",
            "kept-2",
            "kept-1,1,1,1",
            "writing-2",
            "writing-1,1,1,1",
            "dims-2",
            "dims-1,2,1",
        ),
    ),
)
def test_nonstrict(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
