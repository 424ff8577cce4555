"""Mixed precision over ranks: autocast, torch.amp.GradScaler as it is, models in bfloat16 (docs/semantics.md,
section 6).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.worker import FAULT_VARIABLE


def _case(name: str, model: str, replicas: str, check: str, num_micro_batches: int, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(
        name=f"precision-{name}", model=model, replicas=replicas, world=world, check=check,
        num_micro_batches=num_micro_batches, **members,
    )  # fmt: skip


def _cast(dtype: str) -> dict[str, Any]:
    return {"parameters": {"autocast": dtype}, "dtype": "float32"}


CASES = (
    _case("structure_bfloat16", "mlp", "1,1", "autocast_structure", 1, **_cast("bfloat16")),
    _case("structure_float16", "mlp", "1,1", "autocast_structure", 1, **_cast("float16")),
    _case("accuracy_bfloat16", "mlp_loss", "1,1", "autocast_accuracy", 3, **_cast("bfloat16")),
    _case("accuracy_outside", "mlp", "1,1", "autocast_accuracy", 2, **_cast("bfloat16")),
    _case(
        "accuracy_inductor",
        "mlp_loss",
        "1,1",
        "autocast_accuracy",
        2,
        stage_compiler="inductor",
        **_cast("bfloat16"),
    ),
    _case("accuracy_tied", "tied_embedding", "1,2,1", "autocast_accuracy", 3, **_cast("bfloat16")),
    _case("accuracy_float16", "padded", "1,1", "autocast_accuracy", 2, **_cast("float16")),
    _case("bfloat16", "mlp_loss", "1,1", "in_bfloat16", 3, dtype="bfloat16", rows=(12, 13)),
    _case("bfloat16_outside", "mlp", "2", "in_bfloat16", 3, dtype="bfloat16", rows=(12, 13)),
    _case("bfloat16_tied", "tied_embedding", "2,2", "in_bfloat16", 4, dtype="bfloat16", rows=(9, 8, 12, 8)),
    _case("scales_differ", "mlp_loss", "1,1", "scales_differ", 2),
    _case("another_model", "mlp_loss", "1,1", "scaler_of_another_model", 2),
)
_FIRST, _LAST = "body.layers.0.weight", "body.layers.4.bias"
SCALED = (
    _case("scaler", "mlp_loss", "1,1", "scaler_steps", 3, parameters={"planted": {"2": _FIRST, "3": _LAST, "6": _FIRST}}),
    _case("scaler_outside", "mlp", "1,2,1", "scaler_steps", 2, parameters={"planted": {"1": "layers.0.bias", "5": "layers.4.weight"}}),
    # The first stage trains nothing, so that its rank has no gradient in which an infinity could show.
    _case(
        "scaler_frozen_stage", "frozen", "1,1", "scaler_steps", 2,
        options={"stage_starts": "layers.2"}, parameters={"planted": {"2": "layers.5.weight"}},
    ),
)  # fmt: skip
OVERFLOW = _case("overflow_in_one_stage", "mlp", "1,1", "overflow_in_one_stage", 1, dtype="float32")
PLANTED = (
    _case(
        "planted-deaf_scaler", "mlp_loss", "1,1", "scaler_steps", 3,
        parameters={"planted": {"2": _FIRST}}, environment={FAULT_VARIABLE: "deaf_scaler"},
    ),
    _case(
        "planted-late_seed", "mlp", "1,1", "overflow_in_one_stage", 1,
        dtype="float32", environment={FAULT_VARIABLE: "late_seed"},
    ),
)  # fmt: skip


# The others show the same on other models and plans; planted faults need ranks of their own.
BY_DEFAULT = ("structure_float16", "accuracy_bfloat16", "bfloat16", "scaler", "overflow_in_one_stage")


def _parameters(cases: tuple[Case, ...]) -> list[Any]:
    names = [case.name.removeprefix("precision-") for case in cases]
    marks = [() if name in BY_DEFAULT else (pytest.mark.full,) for name in names]
    return [pytest.param(case, id=name, marks=marks_of) for case, name, marks_of in zip(cases, names, marks)]


@pytest.mark.parametrize("case", _parameters(CASES))
def test_precision(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("case", _parameters(SCALED))
def test_an_infinity_in_one_stage_skips_the_step_on_all_ranks(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    scales = {tuple(result["scales"]) for result in outcome.results}
    assert len(scales) == 1, f"the ranks' scales: {scales}"
    assert len(set(next(iter(scales)))) > 1, "the scale never changed"
    if case.model == "frozen":
        assert [result["owns"] for result in outcome.results] == [False, True]


@pytest.mark.parametrize("case", _parameters((OVERFLOW,)))
def test_an_overflow_of_one_stage_is_everybodys(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    first, second = (result["finite"] for result in outcome.results)
    assert any(not one and other for one, other in zip(first, second)), (
        f"the first stage never overflowed alone: {first} {second}"
    )
    assert sum(first) >= 4, f"hardly ever recovered: {first}"
    assert len({tuple(result["scales"]) for result in outcome.results}) == 1


@pytest.mark.parametrize("case", _parameters(PLANTED))
def test_a_planted_fault_fails_the_comparison(case: Case, outcome_of: OutcomeOf) -> None:
    failures = outcome_of(case).failures
    assert any("in one process" in text or "moved" in text for text in failures), failures
