"""A rank holds parameters, gradients and optimizer state of its stages only, and nothing that a user calls
suffers from it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.memory_checks import NUM_LARGE_LAYERS


def _case(
    name: str, model: str, replicas: str, check: str, num_micro_batches: int = 2, **members: Any
) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(
        name=f"memory-{name}",
        model=model,
        replicas=replicas,
        world=world,
        check=check,
        num_micro_batches=num_micro_batches,
        **members,
    )


LARGE = tuple(
    _case(
        f"large-{replicas}",
        "mlp",
        replicas,
        "memory_falls",
        1,
        rows=rows,
        dtype="float32",
        limit_seconds=150.0,
    )
    for replicas, rows in (("1,1", (2, 2)), ("1,1,1,1", (2, 2, 2, 2)))
)
OTHER = (
    _case("state_dict", "mlp_loss", "1,1", "state_dict_round_trip"),
    _case("state_dict_tied", "tied_embedding", "1,1,1,1", "state_dict_round_trip"),
    _case("state_dict_frozen", "lora", "1,2,1", "state_dict_round_trip"),
    _case("state_dict_one_process", "mlp_loss", "1", "state_dict_round_trip"),
    _case("load_before_first_step", "tied_embedding", "1,1", "load_before_first_step"),
    _case("clipping", "mlp_loss", "1,1", "clipping"),
    _case("clipping_tied", "tied_embedding", "1,2,1", "clipping"),
    _case("clipping_one_process", "tied_embedding", "1", "clipping"),
    _case("hooks", "tied_embedding", "1,1", "hooks"),
    _case("hooks_outside", "mlp", "1,2", "hooks"),
    _case("anomaly", "mlp_loss", "1,1", "anomaly"),
    # The first stage trains nothing, so that its rank has nothing to clip.
    _case("clipping_frozen_stage", "frozen", "1,1", "clipping", options={"stage_starts": "layers.2"}),
)
TOUCHED = (
    _case("touch", "mlp_loss", "1,1", "touch_released"),
    _case("touch_four", "mlp_loss", "1,1,1,1", "touch_released"),
    _case("generate", "gpt2", "1,1", "generate_past_the_call"),
)


REPORTED = tuple(
    _case(f"report-{model}-{replicas}", model, replicas, "memory_is_reported")
    for model, replicas in (("mlp_loss", "1,1"), ("tied_embedding", "1,2,1"), ("mlp_loss", "1"))
)


@pytest.mark.parametrize("case", cases(REPORTED, "memory"))
def test_the_report_counts_what_there_is(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    first, *others = (result["stages"] for result in outcome.results)
    assert all(other == first for other in others), "the ranks were told different things"
    assert [stage["stages"] for stage in first] == [[index] for index in range(case.num_stages)]


@pytest.mark.parametrize("case", cases(LARGE, "memory", ("large-1,1,1,1",)))
def test_memory_of_the_process_falls(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    total = outcome.results[0]["total"]
    assert sum(result["owned"] for result in outcome.results) == total, (
        "the ranks own more or less than the model"
    )
    for result in outcome.results:
        assert result["owned"] < total / case.num_stages + total / NUM_LARGE_LAYERS
        assert result["measured"]["first backward"] < 2 * total / case.num_stages * 1.2 + total / 10, result


@pytest.mark.parametrize("case", cases(OTHER, "memory"))
def test_state_and_clipping(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("case", cases(TOUCHED, "memory", ("touch_four",)))
def test_touching_what_is_not_here_never_crashes(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
