"""Configurations that are drawn at random in the words of AutoDist, of EPL and of this project really run: each trains as
one process does, or all ranks refuse it with an error of ours that has a cure.
"""

from __future__ import annotations

import pytest

from tests.choice import mostly
from tests.distributed.conftest import OutcomeOf
from tests.distributed.drawn_configurations import ROWS, drawn
from tests.distributed.harness.case import Case

NUM_DRAWS = 200
BY_DEFAULT = tuple(range(6))


def _case(number: int) -> Case:
    return Case(
        name=f"drawn-{number}",
        check="drawn_configuration",
        world=len(ROWS),
        rows=ROWS,
        parameters={"drawn": drawn(number)},
        limit_seconds=180.0,
    )


CASES = {number: _case(number) for number in range(NUM_DRAWS)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES[n], id=str(n), marks=p.marks)
        for n, p in zip(CASES, mostly(CASES, BY_DEFAULT), strict=True)
    ],
)
def test_runs_as_one_process_or_is_refused(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    refused = [bool(result["refused"]) for result in outcome.results]
    failed = [result["failed"] for result in outcome.results if "failed" in result]
    assert not failed and len(set(refused)) == 1, f"{case.parameters}: {outcome.results}"


def test_draws_have_all_words_and_every_item_of_some() -> None:
    draws = [drawn(number) for number in range(NUM_DRAWS)]
    assert draws == [drawn(number) for number in range(NUM_DRAWS)]
    assert {each["words"] for each in draws} == {"own", "autodist", "epl"}
    items = {name for each in draws for name in each["items"]}
    assert {
        "zero_stage",
        "offload",
        "schedule",
        "boundary_dtype",
        "num_apply_group",
        "sparse_gradients",
    } <= items
    assert {each["model"]["table"] for each in draws} == {"dense", "sparse", "tied", "bag", "padded"}
