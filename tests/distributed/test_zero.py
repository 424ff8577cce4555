"""ZeRO 1 and 2: equal to one process, with gradients and optimizer state on the rank that updates a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import test_checkpoints
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.zero_checks import OPTIMIZERS


def _case(check: str, replicas: str, level: int, num_groups: int = 1, **members: Any) -> Case:
    parameters, more = members.get("parameters", {}), members.pop("options", {})
    limit_seconds = members.pop("limit_seconds", 120)
    options = {"zero_stage": level, "zero_ngroups": num_groups} | more
    if "," in replicas:
        options["stage_starts"] = "second"  # so that both stages have parameters, and share some
    words = (
        check,
        *parameters.values(),
        replicas,
        f"level{level}",
        *([f"groups{num_groups}"] * (num_groups > 1)),
        *more,
    )
    return Case(
        name=f"zero-{'-'.join(map(str, words))}",
        check=f"zero_{check}",
        replicas=replicas,
        world=sum(map(int, replicas.split(","))),
        num_micro_batches=2,
        options=options,
        limit_seconds=limit_seconds,
        **members,
    )


def _optimizers(name: str, replicas: str, level: int, num_groups: int = 1, **options: Any) -> Case:
    return _case("optimizers", replicas, level, num_groups, parameters={"optimizer": name}, options=options)


# Every optimizer on some plan, every plan with some optimizer; all of both with `-m full`.
PLANS = (("2", 1, 1), ("2", 2, 1), ("2,2", 1, 1), ("2,2", 2, 1), ("4", 1, 2), ("4", 2, 3), ("1,3", 2, 1))
CHOSEN = [
    _optimizers(name, *PLANS[(2 * place + shift) % len(PLANS)])
    for place, name in enumerate(OPTIMIZERS)
    for shift in (0, 1)
]
CASES = (
    *CHOSEN,
    _optimizers("adamw", "2,2", 2, schedule="fill_drain"),
    _optimizers("sgd", "2", 1, shared_memory=False, bucket_mb=0.0001),
    _optimizers("adamw", "2", 2, sync_allreduce=True),
    _optimizers("adafactor", "2,2", 1, num_apply_group=2),
    _optimizers("muon", "2", 2, num_apply_group=3),
    _case("in_parts", "2,2", 0, options={"num_apply_group": 2}),
    _case("in_parts", "2", 2, options={"num_apply_group": 3}),
    _case("in_parts", "1", 0, options={"num_apply_group": 3}),
    _case("scaled", "2,2", 1, options={"num_apply_group": 3}),
    _case("between", "2,2", 1),
    _case("between", "2", 2),
    _case("scaled", "2,2", 1),
    _case("scaled", "2", 2),
    _case("hooks", "2,2", 1),
    _case("penalty", "2,2", 2),
    # A sum that some ranks do not come to is a hang: a planted one must end within the limit of its run.
    _case("delayed", "2,2", 1, limit_seconds=60),
    _case("delayed", "4", 2, 2),
    _case("by_hand", "2", 1),
    _case("coupled", "2", 1),
    _case("replanned", "2,2", 1, parameters={"then": 1}),
    _case("replanned", "2,2", 2, parameters={"then": 0}),
    _case("replanned", "2", 0, parameters={"then": 2}),
)
FULL = [_optimizers(name, *plan) for name in OPTIMIZERS for plan in PLANS]


def _parameters(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("zero-")) for case in cases]


@pytest.mark.parametrize("case", _parameters(CASES))
def test_zero(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize("case", _parameters(case for case in FULL if case not in CHOSEN))
def test_zero_full(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


MODELS = ("basic", "batch_norm", "gpt2", "long_skip_loss", "lora", "padded", "root_loss", "tied_embedding")
EQUAL = [
    Case(
        name=f"zero-{model}-{replicas}-level{level}-{schedule}",
        model=model,
        world=sum(map(int, replicas.split(","))),
        replicas=replicas,
        num_micro_batches=2,
        rows=(12, 11, 13, 12)[: sum(map(int, replicas.split(",")))] if model == "batch_norm" else (),
        options={"zero_stage": level, "schedule": schedule},
        limit_seconds=120,
    )
    for model in MODELS
    for level in (1, 2)
    for replicas in ("2", "2,2")
    for schedule in ("1f1b", "fill_drain")
]
SPLIT = [
    replace(case, name=f"{case.name}-split", options={**case.options, "schedule": "zb_h1"})
    for case in EQUAL
    if case.replicas == "2,2"
    and case.options["schedule"] == "1f1b"
    and case.model in ("basic", "tied_embedding")
]
# Half of them, so that every pair of choices occurs.
SOME = [
    case
    for index, case in enumerate(EQUAL)
    if (index // 8 + index // 4 + index // 2 + index) % 2 == 0 and case.model in MODELS[::2]
]


@pytest.mark.parametrize("case", _parameters([*SOME, *SPLIT]))
def test_models(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize("case", _parameters(case for case in EQUAL if case not in SOME))
def test_models_full(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize(
    "cases",
    [test_checkpoints.across(which, zero_stage=2) for which in ("saved", "loaded")],
    ids=("saved", "loaded"),
)
def test_checkpoints_on_another_layout(cases: list[Case], outcome_of: OutcomeOf) -> None:
    """One job has ZeRO over two replicas in the middle stage, the other has no replicas."""
    for case in cases:
        outcome_of(case).raise_if_failed()
