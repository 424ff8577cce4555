"""Which parameters of a test run by default, and which in `make test-full` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

import pytest


def mostly(values: Iterable[Any], by_default: Collection[Any]) -> list[Any]:
    """pytest parameters of `values`; those not in `by_default` are marked `full`. A tuple stands for several
    arguments.
    """
    values = list(values)
    unknown = [value for value in by_default if value not in values]
    assert not unknown, f"{unknown} are no parameters"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in by_default else pytest.mark.full,
        )
        for value in values
    ]


class Named(Protocol):
    """A case: its name begins with what all cases of its test begin with."""

    name: str


def cases(values: Iterable[Named], prefix: str, only_in_full: Collection[str] = ()) -> list[Any]:
    """pytest parameters of cases, by their names without the prefix; those in `only_in_full` are marked
    so.
    """
    named = {case.name.removeprefix(f"{prefix}-"): case for case in values}
    unknown = set(only_in_full) - set(named)
    assert not unknown, f"{unknown} are no cases"
    return [
        pytest.param(case, id=name, marks=pytest.mark.full if name in only_in_full else ())
        for name, case in named.items()
    ]
