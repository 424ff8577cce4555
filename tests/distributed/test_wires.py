"""What travels in fewer bits, in how many buckets and over how many communicators (docs/semantics.md, section 6)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, *words: str, **members: Any) -> Case:
    world = sum(map(int, replicas.split(",")))
    options = {"stage_starts": "second"} if "," in replicas else {}
    return Case(
        name="-".join(("wires", check, replicas, *words)),
        check=f"wires_{check}",
        replicas=replicas,
        world=world,
        rows=(32 // world,) * world,
        num_micro_batches=members.pop("num_micro_batches", 2),
        options=options | members.pop("options", {}),
        limit_seconds=120,
        **members,
    )


def _reduced(dtype: str, *words: str, replicas: str = "2", scale: float = 1.0, **options: Any) -> Case:
    parameters = {word: True for word in words if word in ("shared", "ties", "outside")}
    return _case(
        "equal_rounding_in_one_process",
        replicas,
        dtype,
        *words,
        parameters=parameters,
        options={"gradient_dtype": dtype, "gradient_scale": scale, **options},
    )


def _sent(dtype: str, *words: str, replicas: str = "1,1", **options: Any) -> Case:
    return _case(
        "equal_rounding_in_one_process",
        replicas,
        dtype,
        "sent",
        *words,
        options={"boundary_dtype": dtype, **options},
    )


_ALL = {"states_on_all_ranks": True}
BOUNDARIES = (
    _sent("bf16"),
    _sent("fp16", "zb_h1", schedule="zb_h1"),
    _sent("fp8"),
    _sent("bf16", "fill_drain", schedule="fill_drain", validate_comm=True),
    _sent("fp8", "replicas", replicas="2,2"),
    _sent("bf16", "both", replicas="2,2", gradient_dtype="bf16", gradient_scale=4.0),
    _sent("same"),
)
GRADIENTS = (
    _reduced("bf16"),
    _reduced("fp16", "scaled", scale=128.0),
    _reduced("bf16", "by-three", scale=3.0, bucket_mb=0.001),
    _reduced("bf16", "shared", scale=2.0),
    _reduced("fp16", "zero1", scale=64.0, zero_stage=1),
    _reduced("bf16", "zero2", scale=4.0, zero_stage=2),
    _reduced("bf16", "late", scale=8.0, sync_allreduce=True, bucket_mb=0.001),
    _reduced("bf16", "outside", scale=4.0),
    _reduced("bf16", "outside", "summed", scale=4.0, gradients_reduce_method="sum"),
    _reduced("bf16", "stages", replicas="2,2", scale=16.0),
    _case("within_their_bound", "1,1", "tied", parameters={"ties": True}, options={"gradient_dtype": "bf16", **_ALL}),
    _case(
        "within_their_bound", "2,2", "tied", parameters={"ties": True},
        options={"gradient_dtype": "fp16", "gradient_scale": 256.0, **_ALL},
    ),
    _case("within_their_bound", "1,3", "uneven", options={"gradient_dtype": "bf16", **_ALL}),
    _case("within_their_bound", "4", "zero2", options={"gradient_dtype": "bf16", "zero_stage": 2, **_ALL}),
    _case("overflow", "2", options={"gradient_dtype": "fp16"}),
    _case("overflow", "2", "zero1", options={"gradient_dtype": "fp16", "gradient_scale": 1e8, "zero_stage": 1}),
    _case("delayed", "2", options={"gradient_dtype": "bf16", "gradient_scale": 32.0}),
    _case("delayed", "2", "zero2", options={"gradient_dtype": "fp16", "gradient_scale": 32.0, "zero_stage": 2}),
)  # fmt: skip
TURNS = (
    _case("in_turn", "2", "three", parameters={"number": 3}, options={"max_buckets": 3, "num_communicators": 2}),
    _case("in_turn", "2", "one", parameters={"number": 1}, options={"max_buckets": 1, "num_communicators": 3}),
    _case("in_turn", "2,2", parameters={"number": 2}, options={"max_buckets": 2, "num_communicators": 2}),
    _case("in_turn", "2", "by_size", parameters={"number": 6}, options={"bucket_mb": 0.0001, "num_communicators": 4}),
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name.removeprefix("wires-")) for case in (*GRADIENTS, *BOUNDARIES, *TURNS)],
)
def test_wires(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
