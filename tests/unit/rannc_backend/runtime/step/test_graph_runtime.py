"""When a step must run again with the loss gradient that came, and when scaling what is there will do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
