"""Models that once ended in raw errors train exactly, refusals name the line, and the log tells the
exceptions of the contract once.
"""

from __future__ import annotations

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case

CASES = (
    Case(
        name="odd-models",
        check="odd_models",
        world=2,
        replicas="1,1",
        num_micro_batches=2,
        limit_seconds=180.0,
    ),
    Case(
        name="odd-models-replicas",
        check="odd_models",
        world=2,
        replicas="2",
        num_micro_batches=2,
        limit_seconds=120.0,
    ),
    Case(
        name="odd-library",
        check="library_models",
        world=2,
        replicas="1,1",
        num_micro_batches=2,
        limit_seconds=200.0,
    ),
    Case(name="odd-notices", check="notices", world=2, replicas="1,1", rows=(4, 4)),
    Case(name="odd-notices-replicas", check="notices", world=2, replicas="2", rows=(4, 4)),
    Case(name="odd-refusals", check="refusals", world=2, replicas="1,1"),
)


# Replicas add little to what one process and two stages show, and models of a library, which take minutes, to
# small ones of their kinds.
@pytest.mark.parametrize("case", cases(CASES, "odd", ("models-replicas", "notices-replicas", "library")))
def test_odd(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
