"""Buffers that a model changes, over stages and replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(name: str, replicas: str, check: str, **parameters: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(
        name=f"buffers-{name}",
        replicas=replicas,
        world=world,
        check=check,
        num_micro_batches=parameters.pop("num_micro_batches", 1),
        parameters=parameters,
    )


ORDERS = {
    "training_first": ("train", "train", "eval", "train"),
    "evaluation_first": ("eval", "train", "train", "eval"),
    "without_gradients": ("no_grad", "eval", "train", "no_grad", "eval"),
}
CASES = (
    *(
        _case(f"{model}-{order}", "1,1", "buffers", model=model, modes=modes)
        for model in ("normalized", "counting", "averaging")
        for order, modes in ORDERS.items()
    ),
    _case("counting-replicas", "1,2", "buffers", model="counting", modes=ORDERS["evaluation_first"]),
    _case(
        "counting_wholes",
        "1,1",
        "buffers",
        model="counting_wholes",
        modes=ORDERS["training_first"],
        num_micro_batches=3,
    ),
    _case(
        "counting_wholes-replicas",
        "2",
        "buffers",
        model="counting_wholes",
        modes=ORDERS["without_gradients"],
        num_micro_batches=2,
    ),
    _case(
        "counting-micro_batches",
        "2",
        "buffers",
        model="counting",
        modes=ORDERS["training_first"],
        num_micro_batches=2,
    ),
    _case("meeting", "1,1", "buffers", model="meeting", modes=ORDERS["training_first"]),
    _case("averaging-one_process", "1", "buffers", model="averaging", modes=ORDERS["training_first"]),
    _case("replaced", "1,1", "replaced"),
    _case("replaced-one_process", "1", "replaced"),
    _case("statistics", "2", "statistics_of_replicas"),
    _case("statistics-last_stage", "1,2", "statistics_of_replicas"),
)


ONLY_IN_FULL = (
    "counting_wholes-replicas",
    "counting-micro_batches",
    "normalized-training_first",
    "averaging-evaluation_first",
    "replaced-one_process",
)


@pytest.mark.parametrize("case", cases(CASES, "buffers", ONLY_IN_FULL))
def test_buffers_that_a_model_changes(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
