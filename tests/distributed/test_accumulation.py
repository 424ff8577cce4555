"""The option gradient_accumulation_dtype: sums in float32 of gradients of 16 bits, rounded once (docs/semantics.md,
section 6).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(check: str, replicas: str, num_micro_batches: int = 32, *words: str, **members: Any) -> Case:
    world = sum(map(int, replicas.split(",")))
    more = members.pop("options", {})
    return Case(
        name="-".join(("accumulation", check, replicas, *words)),
        check=f"accumulation_{check}",
        replicas=replicas,
        world=world,
        rows=(128 // world,) * world,
        num_micro_batches=num_micro_batches,
        options={"gradient_accumulation_dtype": "float32"}
        | ({"stage_starts": "second"} if "," in replicas else {})
        | more,
        limit_seconds=120,
        **members,
    )


CASES = (
    _case("rounds_once", "1,1"),
    _case("rounds_once", "1,1", 32, "inductor", stage_compiler="inductor"),
    _case("rounds_once", "1,1", 32, "float16", parameters={"dtype": "float16"}),
    _case("rounds_once", "2", 32, "zero1", options={"zero_stage": 1}),
    _case("rounds_once", "2,2", 32, "zero2", options={"zero_stage": 2}),
    _case("rounds_once", "2", 32, "sync", options={"sync_allreduce": True, "bucket_mb": 0.0001}),
    _case("rounds_once", "1,1", 32, "zb_h1-tied", parameters={"ties": True}, options={"schedule": "zb_h1"}),
    _case("rounds_once", "2,2", 32, "fill_drain-tied", parameters={"ties": True}, options={"schedule": "fill_drain"}),
    _case("scaled", "1,1"),
    _case("scaled", "1,1", 32, "float16", parameters={"dtype": "float16"}),
    _case("scaled", "2", 16, "zero2", options={"zero_stage": 2}),
    _case("published", "2"),
    _case("delayed", "4"),
    _case("delayed", "2", 32, "zero2", options={"zero_stage": 2}),
    _case("verified", "1,1", 32, options={"verify_recomp": True, "recompute": "0"}),
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.removeprefix("accumulation-")) for case in CASES]
)
def test_accumulation(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
