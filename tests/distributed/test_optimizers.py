"""Optimizers, norms and modules beside a compiled model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.optimizer_checks import COUPLED


def _case(name: str, replicas: str, check: str, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(name=f"optimizers-{name}", replicas=replicas, world=world, check=check, **members)


def _state(when: str, whole: bool) -> dict[str, Any]:
    return {"loaded": when, "on_all_ranks": whole}


CASES = (
    *(
        _case(f"coupled-{kind}", "1,1", "coupled", model="mlp_loss", parameters={"kind": kind})
        for kind in COUPLED
    ),
    *(
        _case(f"coupled-{kind}-replicas", "2", "coupled", model="mlp_loss", parameters={"kind": kind})
        for kind in ("lbfgs", "sam")
    ),
    _case("untried", "1,1", "untried"),
    _case("sharding", "1,1", "sharding", model="mlp_loss"),
    _case("total_norm", "1,1", "total_norm", model="tied_embedding"),
    _case("total_norm-replicas", "1,2,1", "total_norm", model="mlp"),
    *(
        _case(
            f"head-{replicas}-{flag}",
            replicas,
            "head_outside",
            parameters={"synchronized": flag},
            num_micro_batches=2,
        )
        for replicas in ("1,1", "2")
        for flag in (False, True)
    ),
    *(
        _case(
            f"state-{model}-{when}-{whole}",
            counts,
            "state_of_optimizer",
            model=model,
            parameters=_state(when, whole),
        )
        for model, counts, when, whole in (
            ("tied_embedding", "1,1", "before", False),
            ("tied_embedding", "1,1", "after", True),
            ("mlp_loss", "1,2", "after", False),
            ("lora", "2", "before", True),
        )
    ),
    _case("partial_states", "1,1", "partial_states", model="mlp_loss"),
    _case(
        "state_follows",
        "1,1",
        "state_follows",
        model="mlp_loss",
        parameters={"replicas": ["1,1", "2", "1,1", "1,1"]},
    ),
    _case("plain_training", "2", "plain_training", rows=(4, 4)),
)


@pytest.mark.parametrize(
    "case",
    cases(
        CASES, "optimizers", ("coupled-sam-replicas", "state-lora-before-True", "coupled-sam_in_two_steps")
    ),
)
def test_optimizers_beside_a_compiled_model(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
