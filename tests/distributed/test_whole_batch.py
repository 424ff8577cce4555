"""Models in which samples of a batch meet train exactly, on the whole batch."""

from __future__ import annotations

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case, on_plans

CASES = on_plans(
    "whole-batch",
    [
        ("models", "1,1"),
        ("models", "2"),
        ("models", "2,1"),
        ("limits", "2"),
        ("data_sizes", "1,1"),
        ("numbers", "1,1"),
        ("numbers", "2"),
        ("experts", "1,1"),
        ("experts", "2"),
        ("experts", "2,1"),
        ("chosen", "1,1"),
        ("chosen", "2"),
        ("chosen", "2,1"),
    ],
    limit_seconds=240.0,
)


@pytest.mark.parametrize(
    "case",
    cases(
        CASES, "whole-batch", ("models-2", "models-2,1", "numbers-2", "experts-2,1", "chosen-2", "chosen-2,1")
    ),
)
def test_whole_batch(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
