"""Option offload: equal to one process, with parameters, gradients and optimizer state on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import choice
from tests.distributed import (
    test_accumulation,
    test_buffers,
    test_checkpoints,
    test_contract,
    test_memory,
    test_several_stages,
    test_zero,
)
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, name: str = "", **members: Any) -> Case:
    more = members.pop("options", {})
    # Both stages have parameters, and share some.
    placed = {"stage_starts": "second"} if "," in replicas else {}
    return Case(
        name="-".join(
            ["offload", name or check.removeprefix("offload_"), replicas, *map(str, more.values())]
        ),
        check=check,
        replicas=replicas,
        world=sum(map(int, replicas.split(","))),
        num_micro_batches=2,
        options={"offload": "parameters"} | placed | more,
        limit_seconds=120,
        **members,
    )


def _optimizers(name: str, replicas: str, **options: Any) -> Case:
    return _case("zero_optimizers", replicas, name, parameters={"optimizer": name}, options=options)


CASES = (
    _optimizers("adamw", "1"),
    _optimizers("sgd", "2", bucket_mb=0.0001),
    _optimizers("adamw", "2,2", zero_stage=2),
    _optimizers("sgd", "1,1", schedule="fill_drain"),
    _optimizers("muon", "2,2", sync_allreduce=True),
    _optimizers("adafactor", "2,2", zero_stage=1, num_apply_group=2),
    _case("zero_scaled", "1,1"),
    _case("zero_hooks", "1,1"),
    _case("zero_penalty", "2,2"),
    _case("zero_delayed", "2,2"),
    _case("zero_delayed", "2", options={"zero_stage": 1}),
    _case("zero_between", "1,1"),
    _case("offload_pools", "1"),
    _case("offload_pools", "2,2"),
    _case("offload_pools", "2,2", options={"zero_stage": 2}),
    _case("offload_pools", "1,1", options={"schedule": "fill_drain"}),
    _case("offload_changes", "1,1"),
    _case("offload_changes", "2,2", options={"schedule": "fill_drain"}),
    _case("offload_held_graph", "1,1", parameters={"schedule": "1f1b"}),
    _case("offload_held_graph", "1,1", "held_deferred", parameters={"schedule": "fill_drain"}),
)


ONLY_IN_FULL = (
    "muon-2,2-True", "sgd-1,1-fill_drain", "zero_penalty-2,2", "zero_delayed-2-1", "zero_between-1,1", "pools-2,2-2",
)  # fmt: skip


@pytest.mark.parametrize("case", choice.cases(CASES, "offload", ONLY_IN_FULL))
def test_offload(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


# Of other files, as they are there, with parameters on the host.
_OTHERS = (
    *test_contract.EQUAL,
    *(case for case in test_contract.OTHER if "shared_sums" not in case.name),
    *test_several_stages.EQUAL,
    *test_several_stages.OTHER,
    *test_accumulation.CASES,
    *test_memory.OTHER,
    *test_buffers.CASES,
    *test_zero.CASES,
)
_BY_DEFAULT = (
    "contract-frozen", "contract-tied_over_four", "contract-modes",
    "contract-retain_graph_zb_h1", "contract-rows_differentiated", "contract-forward_twice", "several-interleaved-accumulate",
    "several-zb_v-mlp_loss-1,1,1,1,1,1,1,1", "several-zb_v-zero2", "accumulation-rounds_once-2,2-zero2",
)  # fmt: skip


def _offloaded(case: Case) -> Case:
    return replace(case, name=f"offload-{case.name}", options={**case.options, "offload": "parameters"})


OTHERS = [_offloaded(case) for case in _OTHERS]
IN_FULL = [
    case.name.removeprefix("offload-")
    for case in OTHERS
    if case.name.removeprefix("offload-") not in _BY_DEFAULT
]


@pytest.mark.parametrize("case", choice.cases(OTHERS, "offload", IN_FULL))
def test_what_holds_without_holds_with_offload(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


_DROPOUT = (test_contract.RANDOM[0], _offloaded(test_contract.RANDOM[1]))


@pytest.mark.parametrize("cases", [pytest.param(_DROPOUT, id="two stages")])
def test_dropout_is_the_same(cases: tuple[Case, Case], outcome_of: OutcomeOf) -> None:
    test_contract.test_dropout_does_not_depend_on_the_plan(cases, outcome_of)


_CHECKPOINTS = [test_checkpoints.across(which, offload="parameters") for which in ("saved", "loaded")]


@pytest.mark.parametrize("cases", _CHECKPOINTS, ids=("saved", "loaded"))
def test_checkpoints_on_another_layout(cases: list[Case], outcome_of: OutcomeOf) -> None:
    """One job has its parameters on the host; one has two replicas in the middle stage."""
    for case in cases:
        outcome_of(case).raise_if_failed()
