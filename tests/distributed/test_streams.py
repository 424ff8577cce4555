"""What the runtime queues on CUDA streams is ordered by events alone: races and host waits are found on a
played device.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case

# A group of its own: these cases put another transport into the process.
_ENVIRONMENT = {"TEST_STREAMS": "1"}


def _case(name: str, model: str, replicas: str, num_micro_batches: int, **members: Any) -> Case:
    world = sum(int(number) for number in replicas.split(","))
    return Case(
        name=f"streams-{name}",
        model=model,
        world=world,
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        check="on_streams",
        environment=_ENVIRONMENT,
        num_steps=3,
        limit_seconds=120.0,
        **members,
    )


CASES = (
    _case("pipeline", "mlp_loss", "1,1", 4),
    _case("replicas", "padded", "2", 2),
)
FULL = (
    _case("loss_outside", "mlp", "1,1", 3),
    _case("buffers", "batch_norm", "1,1", 1),
    _case("tied", "tied_embedding", "1,1", 3),
    _case("long_skip", "long_skip_loss", "1,2,1", 4),
    _case("four_stages", "mlp_loss", "1,1,1,1", 6),
)


def _parameters(cases: tuple[Case, ...], *marks: Any) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("streams-"), marks=marks) for case in cases]


@pytest.mark.parametrize("case", [*_parameters(CASES), *_parameters(FULL, pytest.mark.full)])
def test_no_race_and_no_host_wait(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
