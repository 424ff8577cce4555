"""Plans that are measured before the first step (docs/planning.md, the best plans)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, *words: str, best: int = 0, **options: Any) -> Case:
    return Case(
        name="-".join(("trial", check, *words)),
        check=f"trial_{check}",
        world=2,
        rows=(5, 4),
        num_micro_batches=2,
        options={"num_plans": 3, "plan_cache": False, "cluster": "generic-cpu", **options},
        parameters={"best": best},
        limit_seconds=180,
    )


TRIALS = (
    _case("leaves_nothing", "second", best=1),
    _case("leaves_nothing", "first", best=0),
    # Dynamo restores generators after a capture; nobody does here.
    _case("leaves_nothing", "nonstrict", best=1, capture="nonstrict"),
    _case("leaves_nothing", "third", "fill_drain", best=2, schedule="fill_drain", pipeline_num=0),
    _case("own_orders", schedule="list_scheduled", pipeline_num=4),
    _case("is_kept"),
    _case("ends_in_time"),
)


@pytest.mark.parametrize("case", cases(TRIALS, "trial", ("leaves_nothing-first", "own_orders")))
def test_trials(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
