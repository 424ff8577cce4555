"""RaNNC's own test suite, through `RaNNCModule`, in float32 within 1e-5 where RaNNC allowed 0.1 and caught
what failed.

Its ten models x {1, 2, 4} forwards per update x partition_num {1, 2, 4}; its spare models, BatchNorm
variants, tied embedding and custom operator; bfloat16; rank 0's inputs; clipping; evaluation; saved and
loaded models, optimizers and deployments. A thin part runs by default.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.worker import FAULT_VARIABLE
from tests.models import RANNC_SPARE, RANNC_SUITE, entry

ACCUMULATE = (1, 2, 4)
PARTITIONS = (1, 2, 4)
LIMIT_SECONDS = 180.0


def _case(
    name: str,
    model: str,
    world: int,
    partition_num: int,
    accumulate: int = 1,
    *,
    check: str = "conformance",
    **members: Any,
) -> Case:
    # Statistics of a batch are those of one micro-batch on one replica: the comparison takes one of each.
    alone = entry(model).batch_statistics
    rows = (
        tuple((6, 5, 7, 6)[rank] for rank in range(world))
        if alone
        else tuple((4, 3, 5, 4)[rank] for rank in range(world))
    )
    defaults: dict[str, Any] = {"dtype": "float32", "rows": rows, "num_micro_batches": 1 if alone else 2}
    options = {"partition_num": partition_num} | dict(members.pop("options", {}))
    return Case(
        name=f"conformance-{name}-r{world}-p{partition_num}-a{accumulate}",
        model=model,
        world=world,
        check=check,
        parameters={"accumulate": accumulate},
        options=options,
        limit_seconds=LIMIT_SECONDS,
        **(defaults | members),
    )


def matrix() -> list[Case]:
    """RaNNC's matrix, on 2 ranks and on 4."""
    cases = []
    for chosen, world, accumulate, partition_num in itertools.product(
        RANNC_SUITE, (2, 4), ACCUMULATE, PARTITIONS
    ):
        if partition_num <= world:
            cases.append(_case(chosen.name, chosen.name, world, partition_num, accumulate))
    return cases


def others() -> list[Case]:
    """What RaNNC's other test files do, on 2 ranks and on 4."""
    cases = []
    for world in (2, 4):
        for chosen in RANNC_SPARE:
            # One replica per stage where the whole batch has to be in one place.
            partition_num = world if chosen.batch_statistics else 2
            if not chosen.batch_statistics or world == 2:
                cases.append(_case(chosen.name, chosen.name, world, partition_num, 2))
        for model in ("small_param", "loss_out", "basic", "shared_param", "embedding"):
            options = {"gather_inputs": False}
            cases.append(_case(f"rank_0-{model}", model, world, 2, 2, options=options))
        for accumulate in ACCUMULATE:
            cases.append(
                _case(
                    "bfloat16",
                    "small_param",
                    world,
                    2,
                    accumulate,
                    dtype="bfloat16",
                    check="conformance_training",
                )
            )
        for model in ("layer_norm", "tied_embedding", "loss_out"):
            cases.append(_case(f"clipping-{model}", model, world, 2, check="conformance_clipping"))
        for model in ("basic", "tied_embedding", "norm_running"):
            if world == 2 or model != "norm_running":
                cases.append(_case(f"evaluation-{model}", model, world, 2, check="conformance_evaluation"))
        for model in ("basic", "tied_embedding"):
            divided = _case(f"enable_zero-{model}", model, world, world // 2, 2)
            cases.append(replace(divided, parameters={**divided.parameters, "enable_zero": True}))
        offloaded = _case("offload_params-tied_embedding", "tied_embedding", world, 2, 2)
        cases.append(replace(offloaded, parameters={**offloaded.parameters, "offload_params": True}))
        cases.append(_case("switches", "batch_norm", world, world, check="conformance_switches"))
        for model in ("basic", "tied_embedding"):
            cases.append(_case(f"deployment-{model}", model, world, 2, check="conformance_deployment"))
    return cases


# test_equality.py trains all of these models by default; here are the rest of the surface and one of each
# kind.
IN_DEFAULT = ("small_param", "fork_join", "shared_param", "embedding")


def chosen() -> list[Case]:
    """The thin part: some models, each number of forwards, and the other checks once."""
    by_name = {case.name: case for case in [*matrix(), *others()]}
    suite = [(i, chosen.name) for i, chosen in enumerate(RANNC_SUITE) if chosen.name in IN_DEFAULT]
    names = [f"{model}-r2-p{PARTITIONS[i % 2]}-a{ACCUMULATE[i % 3]}" for i, model in suite]
    names += [
        "norm_running-r2-p2-a2",
        "custom_operator-r2-p2-a2",
        "rank_0-shared_param-r2-p2-a2",
        "bfloat16-r2-p2-a2",
        "enable_zero-tied_embedding-r2-p1-a2",
        "offload_params-tied_embedding-r2-p2-a2",
    ]
    names += ["clipping-tied_embedding-r2-p2-a1", "switches-r2-p2-a1"]
    return [by_name[f"conformance-{name}"] for name in names]


def _parameters(cases: list[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("conformance-"), marks=marks) for case in cases]


_CHOSEN = {case.name for case in chosen()}


@pytest.mark.parametrize("case", _parameters(chosen()))
def test_conforms(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize(
    "case", _parameters([case for case in [*matrix(), *others()] if case.name not in _CHOSEN])
)
def test_conforms_full(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


PLANTED = [
    _case(f"planted-{fault}", model, 2, 2, 2, environment={FAULT_VARIABLE: fault}, rows=(6, 6))
    for fault, model in (
        ("scaled_gradients", "small_param"),
        ("dropped_gradient", "loss_out"),
        ("swapped_values", "basic"),
    )
]


@pytest.mark.full
@pytest.mark.parametrize("case", _parameters(PLANTED))
def test_a_planted_fault_fails_the_suite(case: Case, outcome_of: OutcomeOf) -> None:
    failures = outcome_of(case).failures
    assert any("relative error" in text for text in failures), failures
