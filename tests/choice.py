"""Which parameters of a test run by default, and which in `make test-full` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly(values: Iterable[Any], by_default: Collection[Any]) -> list[Any]:
    """pytest parameters of `values`; those not in `by_default` are marked `full`. A tuple stands for several arguments."""
    values = list(values)
    unknown = [value for value in by_default if value not in values]
    assert not unknown, f"{unknown} are no parameters"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if value in by_default else pytest.mark.full)
        for value in values
    ]
