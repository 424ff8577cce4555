"""Ranks that compute several stages: equal to one process, whatever the schedule, replicas and compiler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.test_equality import check_ownership


def _case(name: str, model: str, replicas: str, schedule: str, **members: Any) -> Case:
    """`replicas`: by stage; those of the second half are on the ranks of the first."""
    per_rank = members.pop("stages_per_rank", 2)
    options = {"schedule": schedule} | members.pop("options", {})
    options |= {"stages_per_rank": per_rank} if per_rank > 2 else {}
    return Case(
        name=f"several-{schedule}-{name}",
        model=model,
        replicas=replicas,
        world=sum(int(number) for number in replicas.split(",")) // per_rank,
        stages_per_rank=per_rank,
        options=options,
        **{"num_micro_batches": 3, **members},
    )


_MODELS = (
    ("mlp_loss", "1,1,1,1"),
    ("mlp_loss", "1,1,1,1,1,1,1,1"),
    ("tied_embedding", "1,1,1,1"),
    ("tied_embedding", "2,2,2,2"),
    ("long_skip_loss", "1,1,1,1"),
    ("padded", "1,1,1,1"),
    ("gated", "1,1,1,1"),
    ("gpt2", "1,1,1,1"),
)
EQUAL = (
    *(
        _case(f"{model}-{replicas}", model, replicas, schedule)
        for schedule in ("interleaved", "zb_v", "v_half")
        for model, replicas in _MODELS
    ),
    _case("uneven_replicas", "long_skip_loss", "1,2,1,2", "interleaved", num_micro_batches=2),
    _case("uneven_replicas", "long_skip_loss", "1,2,2,1", "zb_v", num_micro_batches=2),
    _case("small_buckets", "tied_embedding", "2,2,2,2", "interleaved", options={"bucket_mb": 0.0001}),
    _case("inductor", "gpt2", "1,1,1,1", "interleaved", stage_compiler="inductor", limit_seconds=200.0),
    _case("inductor", "long_skip_loss", "1,1,1,1", "zb_v", stage_compiler="inductor", limit_seconds=200.0),
    _case("segments", "gpt2", "1,1,1,1", "zb_v", options={"recompute": "segments"}),
    _case("three_each", "tied_embedding", "1,1,1,1,1,1", "interleaved", stages_per_rank=3),
    _case(
        "three_each_of_two",
        "long_skip_loss",
        "2,2,2,2,2,2",
        "interleaved",
        stages_per_rank=3,
        num_micro_batches=2,
    ),
    _case("one_rank", "gpt2", "1,1", "interleaved"),
    _case("segments", "gpt2", "1,1,1,1", "v_half", options={"recompute": "segments"}, num_micro_batches=6),
    _case("many_micro_batches", "mlp_loss", "1,1,1,1,1,1,1,1", "v_half", num_micro_batches=9),
    _case("one_micro_batch", "mlp_loss", "1,1,1,1", "zb_v", num_micro_batches=1),
    _case("many_micro_batches", "mlp_loss", "1,1,1,1", "interleaved", num_micro_batches=7),
)
OTHER = (
    # Gradients are on the rank that updates alone.
    _case("zero2", "tied_embedding", "2,2,2,2", "zb_v", options={"zero_stage": 2, "bucket_mb": 0.0001}),
    _case("zero1", "mlp_loss", "2,2,2,2", "interleaved", options={"zero_stage": 1}),
    _case("modes", "mlp_loss", "1,1,1,1", "interleaved", check="modes"),
    _case("modes", "gpt2", "1,1,1,1", "zb_v", check="modes", options={"recompute": "segments"}),
    _case(
        "sizes_change",
        "mlp_loss",
        "1,1,1,1",
        "zb_v",
        check="sizes_change",
        parameters={"rows_of_steps": [[4, 3], [3, 4], [7, 2], [1, 1], [1, 2], [4, 3]]},
    ),
    _case("state_dict", "tied_embedding", "1,1,1,1", "interleaved", check="state_dict_round_trip"),
    _case("hooks", "tied_embedding", "1,1,1,1", "zb_v", check="hooks"),
    _case("clipping", "tied_embedding", "2,2,2,2", "interleaved", check="clipping"),
    _case("buffers", "mlp_loss", "1,1", "interleaved", check="buffers_of_one_rank"),
    _case("buffers", "mlp_loss", "2,2", "zb_v", check="buffers_of_one_rank"),
    _case("retain_graph", "mlp_loss", "1,1,1,1", "zb_v", check="retain_graph"),
    _case("accumulate", "tied_embedding", "1,1,1,1", "interleaved", check="accumulate"),
    _case(
        "measured", "mlp_loss", "1,1,1,1", "zb_v", check="measured_steps", num_steps=7, limit_seconds=240.0
    ),
)
ONLY_IN_FULL = (
    "interleaved-gated-1,1,1,1", "zb_v-padded-1,1,1,1", "interleaved-mlp_loss-1,1,1,1,1,1,1,1",
    "zb_v-tied_embedding-2,2,2,2", "interleaved-long_skip_loss-1,1,1,1", "zb_v-uneven_replicas",
    "zb_v-inductor", "zb_v-mlp_loss-1,1,1,1", "interleaved-many_micro_batches", "v_half-mlp_loss-1,1,1,1",
    "v_half-mlp_loss-1,1,1,1,1,1,1,1", "v_half-tied_embedding-1,1,1,1", "v_half-long_skip_loss-1,1,1,1", "v_half-padded-1,1,1,1",
    "v_half-gated-1,1,1,1", "v_half-gpt2-1,1,1,1", "v_half-many_micro_batches",
)  # fmt: skip


@pytest.mark.parametrize("case", cases(EQUAL, "several", ONLY_IN_FULL))
def test_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    check_ownership(case, outcome)


@pytest.mark.parametrize("case", cases(OTHER, "several", ("zb_v-modes", "interleaved-clipping")))
def test_what_else_a_model_does(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
