"""What the user wants computed again: equal to one process, whatever is named and wherever stages end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.runtime_jobs import run_job


def _case(name: str, model: str = "gpt2", replicas: str = "1,1", **members: Any) -> Case:
    per_rank = members.get("stages_per_rank", 1)
    world = sum(int(number) for number in replicas.split(",")) // per_rank
    members = {"num_micro_batches": 3, **members}
    return Case(name=f"told-{name}", model=model, replicas=replicas, world=world, **members)


def _modules(names: str, **more: Any) -> dict[str, Any]:
    return {"recompute_modules": names, **more}


EQUAL = (
    _case("class", options=_modules("GPT2Block")),
    _case("list", options=_modules("transformer.h")),
    _case("inner", options=_modules("attn,mlp", schedule="zb_h1")),
    _case("root", options=_modules("ROOT")),
    # The second block begins in one stage and ends in the other.
    _case("cut", options=_modules("GPT2Block", stage_starts="transformer.h.1.mlp")),
    _case("inductor", options=_modules("GPT2Block"), stage_compiler="inductor", limit_seconds=240.0),
    _case("zb_v", replicas="1,1,1,1", options=_modules("h.0,h.1.mlp", schedule="zb_v"), stages_per_rank=2),
    _case("tied", "tied_embedding", "2,1", options=_modules("ROOT")),
    _case("modes", check="modes", options=_modules("GPT2Block")),
    _case(
        "last_stage",
        replicas="1,1,1",
        options={"recompute": "segments", "recompute_last_stage": 1, "check_gradients": True},
    ),
    _case("marked", "parted", options={"recompute": "marked"}),
    _case("marked_zb_h1", "parted", "1,1,1", options={"recompute": "marked", "schedule": "zb_h1"}),
    _case("marked_cut", "parted", options={"recompute": "marked", "stage_starts": "parts.2.2"}),
    _case(
        "marked_inductor",
        "parted",
        options={"recompute": "marked"},
        stage_compiler="inductor",
        limit_seconds=240.0,
    ),
    _case("marks_alone", "parted", options={"capture": "dynamo"}),
    _case("marked_modes", "parted", "1,2", check="modes", options={"recompute": "marked"}),
    _case("dynamo", options=_modules("GPT2Block", capture="dynamo")),
)


@pytest.mark.parametrize(
    "case", cases(EQUAL, "told", ("tied", "modes", "list", "marks_alone", "marked_zb_h1"))
)
def test_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize(
    ("options", "noticed"),
    [
        pytest.param(
            _modules("Drifting", check_gradients=True, schedule="1f1b"),
            "parameter p_second_layer_",
            id="whole",
        ),
        pytest.param(
            _modules("Drifting", check_gradients=True, schedule="zb_h1"), "input tanh", id="in_two_parts"
        ),
        pytest.param(_modules("head", check_gradients=True), "", id="alike"),
        pytest.param(_modules("Drifting"), "", id="silent", marks=pytest.mark.full),
        pytest.param(_modules("Drifting", verify_recomp=True), "", id="logged", marks=pytest.mark.full),
    ],
)
def test_gradients_that_differ_with_recompute_end_the_job_on_all_ranks(
    tmp_path: Path, options: dict[str, Any], noticed: str
) -> None:
    job = run_job(tmp_path, 2, "check_gradients_worker", json.dumps(options), limit_seconds=120)
    if not noticed:
        assert job.code == 0 and "trained" in job.output, job.output
        assert ("verify_recomp: stage 1" in job.output) == bool(options.get("verify_recomp"))
        return
    assert job.code not in (0, None) and "trained" not in job.output, job.output
    assert f"GradientsDifferError: the gradient of {noticed}" in job.block, job.output
    assert "because of rank 1 " in job.block and "rank 1, stage 1, micro-batch 0" in job.block, job.output
