"""Ranks agree on nothing once a connection has broken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.errors import CommunicationError, OutOfStepError
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.gradients.optimizer_watch import settings_of
from rannc_backend.runtime.step_counts import StepCounts, key_of


class Broken(SingleTransport):
    def check(self) -> None:
        raise CommunicationError(
            "receive of '1>0 B', queued in: step 3, stage 0, micro-batch 2, broke: gone", rank=0, peer=1
        )


def test_what_a_broken_connection_brought_is_not_used() -> None:
    asked: list[Any] = []

    def allgather(value: Any, **_: Any) -> list[Any]:
        asked.append(value)
        return [value]

    def world(transport: SingleTransport) -> Any:
        monitor, control = SimpleNamespace(begin_call=lambda: None), SimpleNamespace(allgather=allgather)
        return SimpleNamespace(transport=transport, monitor=monitor, control=control, counts=StepCounts())

    assert agree(world(SingleTransport()), "training step", 5) == [5]
    with pytest.raises(CommunicationError, match="step 3, stage 0, micro-batch 2, broke"):
        agree(world(Broken()), "training step", 5)
    assert len(asked) == 1


def _stepped(rate: float, momentum: float = 0.9) -> StepCounts:
    parameter = torch.nn.Parameter(torch.ones(1))
    counts = StepCounts()
    counts.of_parameters((key_of(0, "weight"),)).settings = settings_of(
        torch.optim.SGD([parameter], lr=rate, momentum=momentum)
    )
    return counts


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"rate": 0.2}, ["SGD, learning rates ['0.1']", "SGD, learning rates ['0.2']"]),
        ({"rate": 0.1, "momentum": 0.5}, ["SGD, momentum=0.9", "SGD, momentum=0.5"]),
    ],
)
def test_settings_that_differ_are_named_and_no_others(others: dict[str, float], expected: list[str]) -> None:
    counts, other = _stepped(0.1), _stepped(**others)
    assert counts.differences([counts.details(), other.details()]) == (expected, True)
    assert counts.differences([counts.details(), _stepped(0.1).details()]) == ([], False)
    error = OutOfStepError(value_by_rank=expected, settings=True)
    assert "settings of an optimizer" in str(error) and "schedule" in error.cure
