"""The event trace over ranks: see trace_checks.py."""

from __future__ import annotations

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case

_COMMON = {"model": "mlp_loss", "check": "every_rank_is_traced", "limit_seconds": 300}
CASES = [
    Case(name="trace-stages", world=2, replicas="1,1", num_micro_batches=3, **_COMMON),
    pytest.param(
        Case(name="trace-replicas", world=2, replicas="2", num_micro_batches=2, **_COMMON),
        marks=pytest.mark.full,
    ),
    pytest.param(
        Case(name="trace-four", world=4, replicas="1,2,1", num_micro_batches=3, **_COMMON),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_is_traced(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
