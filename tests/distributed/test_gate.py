"""No call goes around the backend, and ranks make their steps together, or an error says so on all of
them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.gate_checks import FAILURES, FALLBACKS
from tests.distributed.harness.case import Case


def _case(name: str, replicas: str, check: str, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    parameters = members.pop("parameters", {})
    return Case(
        name=f"gate-{name}", replicas=replicas, world=world, check=check, parameters=parameters, **members
    )


CASES = (
    _case("models_come_and_go", "1,1", "many_models", parameters={"num_models": 11, "kept": False}),
    _case("models_come_and_go-one_process", "1", "many_models", parameters={"num_models": 11, "kept": False}),
    _case("models_stay", "2", "many_models", parameters={"num_models": 10, "kept": True}),
    *(
        _case(f"fallback-{kind}-{ranks}", "1,1", "fallbacks", parameters={"kind": kind, "ranks": ranks})
        for kind in FALLBACKS
        for ranks in ("all", "one")
    ),
    _case("fallback-replicas", "2", "fallbacks", parameters={"kind": "force_eager", "ranks": "one"}),
    *(_case(f"fails-{kind}", "1,1", "one_rank_fails", parameters={"kind": kind}) for kind in FAILURES),
    _case("fails-replicas", "1,2", "one_rank_fails", parameters={"kind": "in_the_trace"}),
    *(
        _case(f"skips-{what}-{replicas}", replicas, "one_rank_skips", parameters={"what": what})
        for replicas in ("1,1", "2")
        for what in ("call", "backward", "update", "zero_grad", "step", "rate")
    ),
    _case("steps_of_owners", "1,1", "steps_of_owners", model="mlp_loss"),
    _case("steps_of_owners-replicas", "1,2", "steps_of_owners", model="mlp_loss"),
    _case("numbers_that_change", "1,1", "numbers_that_change"),
    _case("numbers_that_change-replicas", "2", "numbers_that_change"),
    _case("state_of_one_rank", "1,1", "state_of_one_rank", model="mlp_loss"),
    *(
        _case(
            f"wrapped-{kind}-{first}-{replicas}",
            replicas,
            "wrapped",
            parameters={"kind": kind, "first": first},
        )
        for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
        for first in ("wrap", "call")
        for replicas in ("1,1", "2")
    ),
    *(
        _case(f"wrapped-{kind}-{first}", "1,1", "wrapped", parameters={"kind": kind, "first": first})
        for kind, first in (
            ("Accelerator", "wrap"),
            ("Accelerator", "call"),
            ("Trainer", "wrap"),
            ("in place", "wrap"),
        )
    ),
)


# The same point once more: with replicas in place of stages, after a call in place of before it.
ONLY_IN_FULL = (
    *(
        "models_come_and_go-one_process",
        "models_stay",
        "fallback-replicas",
        "steps_of_owners-replicas",
        "wrapped-Accelerator-call",
    ),
    *(f"skips-{what}-2" for what in ("backward", "zero_grad", "step", "rate")),
    *(
        f"wrapped-{kind}-{rest}"
        for kind in ("FullyShardedDataParallel", "fully_shard")
        for rest in ("call-2", "wrap-1,1")
    ),
)


@pytest.mark.parametrize("case", cases(CASES, "gate", ONLY_IN_FULL))
def test_the_gate(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
