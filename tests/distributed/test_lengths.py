"""Inputs whose lengths and image sizes change train exactly, and are compiled once for all of them."""

from __future__ import annotations

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case, on_plans

CASES = on_plans(
    "lengths",
    [
        ("models", "1,1"),
        ("models", "2"),
        ("models", "1,2,1"),
        ("others", "1,1"),
        ("others", "2"),
        ("others", "1,2,1"),
        ("nonstrict", "1,1"),
        ("padded", "1,1"),
        ("padded", "2"),
        ("marked", "1,1"),
    ],
    limit_seconds=360.0,
)


ONLY_IN_FULL = ("models-2", "models-1,2,1", "others-1,1", "others-2", "others-1,2,1", "padded-2")


@pytest.mark.parametrize("case", cases(CASES, "lengths", ONLY_IN_FULL))
def test_lengths(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
