"""What planted faults have changed without any other test noticing: see tests/planted_faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case


def _case(name: str, replicas: str, check: str, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(name=f"noticed-{name}", replicas=replicas, world=world, check=check, **members)


CASES = (
    _case("partial_sums", "1,1", "partial_sums", num_micro_batches=5, rows=(3, 2), dtype="float32"),
    _case("random_rows", "1,1", "random_rows", num_micro_batches=2, rows=(4, 4)),
    _case("random_rows-replicas", "2", "random_rows", rows=(4, 4)),
    _case("rerun", "1,1", "rerun", rows=(4, 4)),
    _case("rerun_reads_buffers", "1,1", "rerun_reads_buffers"),
    _case("seeds", "1,1", "seeds", dtype="float32", num_micro_batches=2),
    # Rows of several micro-batches: of one the two outputs would be one tensor.
    _case("one_value_twice", "1,1", "one_value_twice", num_micro_batches=3),
    _case("replicated_outputs", "1,1", "replicated_outputs", num_micro_batches=2),
    _case("replicated_inputs", "1,1", "replicated_inputs"),
    _case("order_of_sets", "1,1", "order_of_sets"),
    _case("resumed", "1,1", "resumed", rows=(4, 4)),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.removeprefix("noticed-")) for case in CASES]
)
def test_noticed(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
