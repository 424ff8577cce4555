"""Ranks agree on nothing once a connection has broken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rannc_backend.errors import CommunicationError
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.step_counts import StepCounts


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
