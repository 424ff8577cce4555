"""Generation by models that are spread over two ranks: the tokens of one process, each rank with its own prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(name: str, check: str = "equal", replicas: str = "1,1", **members: Any) -> Case:
    model, *more = name.split("-")
    return Case(
        name="-".join(["generation", *([] if check == "equal" else [check]), name]),
        check=f"generation_{check}",
        world=sum(map(int, replicas.split(","))),
        replicas=replicas,
        num_micro_batches=members.pop("num_micro_batches", 1),
        parameters={"model": model, **{word: True for word in more if word == "in_place"}}
        | members.pop("parameters", {}),
        limit_seconds=240.0,
        **members,
    )


CASES = (
    _case("gpt2"),
    _case("gpt2-inference", options={"training": False}, parameters={"trains": False}),
    _case("gpt2-in_place", num_micro_batches=2),
    _case("gpt2-replicas", replicas="2"),
    _case("llama"),
    _case("t5"),
    _case("t5-replicas", replicas="2"),
    _case("llama-four", replicas="1,1,1,1", num_micro_batches=3),
    _case("bart", parameters={"trains": False}),
    _case("sliding"),
    _case("gpt2-nonstrict", options={"capture": "nonstrict"}, parameters={"trains": False}),
    _case("gpt2-lanes", replicas="2,2", num_micro_batches=2),
    _case("gpt2", "refused"),
    _case("gpt2", "one_fails"),
)
ONLY_IN_FULL = (
    "bart",
    "gpt2-inference",
    "gpt2-in_place",
    "gpt2-replicas",
    "gpt2-lanes",
    "gpt2-nonstrict",
    "llama",
    "llama-four",
    "sliding",
    "t5",
    "t5-replicas",
)


@pytest.mark.parametrize("case", cases(CASES, "generation", ONLY_IN_FULL))
def test_generation(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
