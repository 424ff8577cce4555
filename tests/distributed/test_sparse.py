"""Embeddings with sparse=True over ranks (docs/semantics.md, section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, *words: str, **members: Any) -> Case:
    world = sum(map(int, replicas.split(",")))
    return Case(
        name="-".join(("sparse", check, replicas, *words)),
        check=f"sparse_{check}",
        replicas=replicas,
        world=world,
        rows={1: (7,), 2: (5, 4), 3: (5, 1, 3), 4: (5, 1, 3, 4)}[world],
        num_micro_batches=members.pop("num_micro_batches", 2),
        limit_seconds=120,
        **members,
    )


def _trains(replicas: str, *words: str, optimizer: str = "adam", **members: Any) -> Case:
    parameters = {"optimizer": optimizer, "model": members.pop("model", "looked")}
    return _case("trains", replicas, *words, parameters=parameters, **members)


def _refused(what: str, word: str, replicas: str = "2", **options: Any) -> Case:
    return _case("refused", replicas, what, parameters={"what": what, "word": word}, options=options)


SPARSE = (
    _trains("2"),
    _trains("1,1"),
    _trains("1,1", "inductor", stage_compiler="inductor", optimizer="sgd"),
    _trains("2", "adagrad", optimizer="adagrad", num_micro_batches=1),
    _trains("1", "sgd", optimizer="sgd", num_micro_batches=3),
    _trains("3", optimizer="sgd", options={"sync_allreduce": True, "bucket_mb": 0.0001}),
    _trains("2,2", options={"schedule": "zb_h1"}),
    _trains("2,2", "inductor", stage_compiler="inductor"),
    _trains(
        "2", "half", dtype="bfloat16", options={"gradient_accumulation_dtype": "float32"}, optimizer="sgd"
    ),
    _trains("2", "zero1", options={"zero_stage": 1}),
    _trains(
        "2", "zero2", options={"zero_stage": 2, "gradient_accumulation_dtype": "float32"}, optimizer="sgd"
    ),
    _trains("3", "zero1_in_groups", options={"zero_stage": 1, "zero_ngroups": 2}),
    _trains("4", "zero1_in_groups", options={"zero_stage": 1, "zero_ngroups": 2}, optimizer="adagrad"),
    _trains("2,2", "zero2", options={"zero_stage": 2, "bucket_mb": 0.0001}),
    _trains("1,1", "offloaded", options={"offload": "parameters"}),
    _trains("2", "offloaded_zero1", options={"offload": "parameters", "zero_stage": 1}),
    _trains("2", "bags", model="bags"),
    _trains("1,1", "bags", model="bags", optimizer="sgd"),
    _trains("2", "bags_inductor", model="bags", stage_compiler="inductor"),
    _trains("1,1", "both_ends", model="both_ends"),
    _trains("1,1", "both_ends_zb_h1", model="both_ends", options={"schedule": "zb_h1"}, num_micro_batches=3),
    _trains("2,1", "both_ends", model="both_ends", optimizer="sgd"),
    _trains("2,2", "both_ends_zero1", model="both_ends", options={"zero_stage": 1}),
    _case("delayed", "2"),
    _case("delayed", "2", "zero1", options={"zero_stage": 1}),
    _case("delayed", "2,1", "both_ends", parameters={"model": "both_ends"}),
    _case("priced", "2"),
    _case("wires", "2", options={"gradient_dtype": "bf16", "gradient_scale": 4.0}),
    _case("wires", "2", "zero1", options={"gradient_dtype": "fp16", "gradient_scale": 64.0, "zero_stage": 1}),
    _case("tied", "2"),
    _case("tied", "1,1"),
    _case("equal_bits", "2"),
    _case("equal_bits", "4"),
    _case("norms", "2"),
    _case("norms", "1,1"),
    _case("scaler", "2"),
    _case("scaler", "1,1"),
    _refused("offsets", "nn.EmbeddingBag of ids in one dimension"),
    _refused("checked", "check_gradients", check_gradients=True),
)
_IN_FULL = (
    "half",
    "zero2",
    "offloaded_zero1",
    "1,1-bags",
    "bags_inductor",
    "zb_h1",
    "wires-2-zero1",
    "delayed-2-zero1",
    "delayed-2,1-both_ends",
    "tied-1,1",
)
_MORE = tuple(
    case.name.removeprefix("sparse-")
    for case in SPARSE
    if case.world > 2 or any(word in case.name for word in _IN_FULL)
)


@pytest.mark.parametrize("case", cases(SPARSE, "sparse", _MORE))
def test_sparse_gradients(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
