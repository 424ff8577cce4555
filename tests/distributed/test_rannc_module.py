"""RaNNC's own surface: what RaNNC's documents promise of RaNNCModule, its functions and its optimizers,
against one process.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(name: str, check: str, model: str, replicas: str, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    chosen = {"num_micro_batches": 2, "num_steps": 3, "limit_seconds": 240.0, **members}
    return Case(name=f"rannc-{name}", check=check, model=model, replicas=replicas, world=world, **chosen)


TRAINED = (
    _case("tied", "trains_as_rannc_module", "tied_embedding", "1,1", parameters={"optimizer": "amsgrad"}),
)
MORE_TRAINED = (
    _case("inside", "trains_as_rannc_module", "mlp_loss", "1,1"),
    _case("buffers", "trains_as_rannc_module", "mlp", "2", parameters={"optimizer": "sgd"}),
    _case("one_process", "trains_as_rannc_module", "mlp_loss", "1"),
    _case("four", "trains_as_rannc_module", "tied_embedding", "1,2,1"),
)
_ONE_OF_EACH = [["before", "rank 0"], ["after", "all ranks"]]
_ALL = [[moment, giver] for moment in ("before", "after") for giver in ("rank 0", "all ranks")]
OTHER = (
    _case(
        "optimizer-sgd",
        "optimizer_state_goes_round",
        "mlp_loss",
        "1,1",
        parameters={"optimizer": "sgd", "loads": _ONE_OF_EACH},
    ),
    _case("delayed-tied", "gradients_are_delayed", "tied_embedding", "1,1"),
    _case("surface", "surface", "mlp", "1,1"),
)
MORE_OTHER = (
    _case("delayed-replicas", "gradients_are_delayed", "mlp_loss", "2"),
    _case(
        "optimizer-adam",
        "optimizer_state_goes_round",
        "tied_embedding",
        "1,1",
        parameters={"optimizer": "adam", "loads": _ALL},
    ),
    _case("delayed-four", "gradients_are_delayed", "tied_embedding", "1,2,1"),
    _case("surface-one_process", "surface", "mlp", "1"),
)


def _without_memory(kind: str) -> tuple[Case, ...]:
    """The same model on one rank and on two: values must not depend on the number of stages."""
    return tuple(
        _case(
            f"without_memory-{kind}-{replicas}",
            "recorded_models_fill_by_stage",
            "mlp_loss",
            replicas,
            parameters={"kinds": [kind]},
        )
        for replicas in ("1", "1,1")
    )


WITHOUT_MEMORY, RESET = _without_memory("recorded"), _without_memory("reset")
LOADED = _case(
    "without_memory-loaded",
    "recorded_models_fill_by_stage",
    "tied_embedding",
    "1,1",
    parameters={"kinds": ["loaded"]},
)


def _parameters(cases: tuple[Case, ...]) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("rannc-")) for case in cases]


def _with_full(default: tuple[Case, ...], more: tuple[Case, ...]) -> list[Any]:
    return _parameters(default) + [
        pytest.param(*p.values, id=p.id, marks=pytest.mark.full) for p in _parameters(more)
    ]


@pytest.mark.parametrize("case", _with_full(TRAINED, MORE_TRAINED))
def test_a_rannc_module_trains_as_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    names = outcome.results[0]["names"]
    assert {name for result in outcome.results for name in result["owned"]} == set(names)
    if case.num_stages > 1:
        assert any(len(result["owned"]) < len(names) for result in outcome.results)


@pytest.mark.parametrize("case", _with_full(OTHER, (*MORE_OTHER, LOADED)))
def test_behaviours(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize(
    "cases",
    [pytest.param(WITHOUT_MEMORY, id="recorded"), pytest.param(RESET, id="reset", marks=pytest.mark.full)],
)
def test_a_model_without_memory_is_filled_stage_by_stage(
    cases: tuple[Case, ...], outcome_of: OutcomeOf
) -> None:
    kind, sums = cases[0].parameters["kinds"][0], []
    for case in cases:
        outcome = outcome_of(case)
        outcome.raise_if_failed()
        for result in outcome.results:
            assert result[f"{kind} bytes"] < result["total bytes"] or case.world == 1
        sums += [result[kind] for result in outcome.results]
    assert all(found == sums[0] for found in sums), "values depend on the number of stages"
