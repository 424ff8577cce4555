"""RaNNC's own surface: what RaNNC's documents promise of RaNNCModule, its functions and its optimizers, against one process."""

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
    _case("inside", "trains_as_rannc_module", "mlp_loss", "1,1"),
    _case("tied", "trains_as_rannc_module", "tied_embedding", "1,1", parameters={"optimizer": "amsgrad"}),
    _case("buffers", "trains_as_rannc_module", "mlp", "2", parameters={"optimizer": "sgd"}),
    _case("one_process", "trains_as_rannc_module", "mlp_loss", "1"),
)
OTHER = (
    _case("optimizer-sgd", "optimizer_state_goes_round", "mlp_loss", "1,1", parameters={"optimizer": "sgd"}),
    _case("optimizer-adam", "optimizer_state_goes_round", "tied_embedding", "1,1", parameters={"optimizer": "adam"}),
    _case("delayed-replicas", "gradients_are_delayed", "mlp_loss", "2"),
    _case("delayed-tied", "gradients_are_delayed", "tied_embedding", "1,1"),
    _case("surface", "surface", "mlp", "1,1"),
    _case("surface-one_process", "surface", "mlp", "1"),
)


# The same model on one rank and on two: values must not depend on the number of stages.
WITHOUT_MEMORY = tuple(
    _case(f"without_memory-{replicas}", "recorded_models_fill_by_stage", "mlp_loss", replicas, parameters={"kinds": kinds})
    for replicas, kinds in (("1", ["recorded", "reset"]), ("1,1", ["recorded", "reset"]))
)
LOADED = _case("without_memory-loaded", "recorded_models_fill_by_stage", "tied_embedding", "1,1", parameters={"kinds": ["loaded"]})


def _parameters(cases: tuple[Case, ...]) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("rannc-")) for case in cases]


@pytest.mark.parametrize("case", _parameters(TRAINED))
def test_a_rannc_module_trains_as_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    names = outcome.results[0]["names"]
    assert {name for result in outcome.results for name in result["owned"]} == set(names)
    if case.num_stages > 1:
        assert all(len(result["owned"]) < len(names) for result in outcome.results)


@pytest.mark.parametrize("case", _parameters(OTHER))
def test_behaviours(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("cases", [pytest.param(WITHOUT_MEMORY, id="one_and_two_ranks")])
def test_a_model_without_memory_is_filled_stage_by_stage(cases: tuple[Case, ...], outcome_of: OutcomeOf) -> None:
    sums = []
    for case in cases:
        outcome = outcome_of(case)
        outcome.raise_if_failed()
        for result in outcome.results:
            assert result["recorded bytes"] < result["total bytes"] or case.world == 1
        sums += [{kind: result[kind] for kind in ("recorded", "reset")} for result in outcome.results]
    assert all(found == sums[0] for found in sums), "values depend on the number of stages"
    assert sums[0]["recorded"] != sums[0]["reset"]


@pytest.mark.full
@pytest.mark.parametrize("case", _parameters((LOADED,)))
def test_a_model_on_meta_takes_a_state_dict_before_its_first_call(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
