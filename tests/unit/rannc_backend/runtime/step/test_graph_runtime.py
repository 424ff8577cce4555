"""When a step must run again with the loss gradient that came, and when scaling what is there will do; what a rank says
while it compiles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.ir.action import GraphUse
from rannc_backend.runtime.step import graph_runtime
from rannc_backend.runtime.step.graph_runtime import GraphRuntime


@pytest.mark.parametrize(
    ("narrow_range", "gradient", "expected", "again"),
    [
        (False, 1.0, 1.0, False),
        (False, 2.0, 1.0, False),  # gradients are linear in it
        (False, float("inf"), 1.0, True),  # 0 * inf is not what a step with it gives
        (False, float("nan"), 1.0, True),
        (True, 1.0, 1.0, False),
        (True, 65536.0, 1.0, True),  # what overflowed or vanished in float16 cannot be scaled back
        (True, float("inf"), 1.0, True),
    ],
)
def test_a_step_runs_again_where_scaling_is_not_exact(
    narrow_range: bool, gradient: float, expected: float, again: bool
) -> None:
    runtime: Any = SimpleNamespace(settings=SimpleNamespace(narrow_range=narrow_range))
    assert GraphRuntime._needs_another_loss_gradient(runtime, gradient, expected) is again


def test_a_rank_that_has_compiled_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others name what each rank does; a part is compiled once, and all ranks wait for the slowest."""
    events: list[str] = []
    monitor = SimpleNamespace(phase=events.append)
    world = SimpleNamespace(rank=1, monitor=monitor, device=torch.device("meta"))

    def make(use: GraphUse, rows: object, lengths: object) -> str:
        events.append("made")
        return "executor"

    monkeypatch.setattr(graph_runtime, "agree", lambda world, what, **limits: events.append(what))
    runtime: Any = SimpleNamespace(
        rehearsal=None,
        world=world,
        label="graph 0",
        settings=SimpleNamespace(stage_ranks=((0,), (1,)), compile_limit_seconds=1.0),
        make_executor=make,
        _executors={},
    )
    state: Any = SimpleNamespace(rows=None, shapes=SimpleNamespace(lengths=()))
    for _ in range(2):
        assert GraphRuntime.executor(runtime, GraphUse.LOSS, state) == "executor"
    part = "stage 1 of graph 0 (loss)"
    begin = [
        f"compiling {part}",
        "made",
        f"compiled {part}, waiting for the others",
        "compilation of graph 0",
    ]
    assert events[:4] == begin and events.count("made") == 1
