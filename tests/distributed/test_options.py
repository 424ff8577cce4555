"""Options that look at a run, or order it otherwise, leave its numbers as they are: against one process in
float64.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case

WATCHED = {
    "checkpointing": True,
    "verify_recomp": True,
    "validate_comm": True,
    "sync_allreduce": True,
    "display_act_value": True,
    "display_comm_value": True,
    "coarsen_by_time": False,
    "min_partition_num": 5,
    "p2p_comm": True,
}


def _case(name: str, **members: Any) -> Case:
    # Stages are compiled twice.
    return Case(name=name, num_micro_batches=2, limit_seconds=240.0, **members)


CASES = (
    _case("options-watched-loss", model="tied_embedding", world=3, replicas="2,1", options=WATCHED),
    _case("options-watched-outside", model="mlp", world=2, replicas="1,1", options=WATCHED),
    _case(
        "options-late-reductions", model="mlp_loss", world=2, replicas="2", options={"sync_allreduce": True}
    ),
)


ONLY_IN_FULL = {"options-watched-outside", "options-late-reductions"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.full] if case.name in ONLY_IN_FULL else [])
        for case in CASES
    ],
)
def test_a_watched_run_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
