"""Tests of which each commit runs a tenth: those that take long.

In: `sampled.json`, which `python -m scripts.sample_tests` writes from a measured run. Out: `SAMPLED`, the ids of
these tests, and `left_out`, those that do not belong to a commit. `make test` runs none of them, `.ci/run` those of
the commit and those that a chosen fault names, and `make test-full` all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.planted_faults.chosen import CHOSEN
from tests.planted_faults.tenths import tenth_of

FILE = Path(__file__).with_suffix(".json")
SAMPLED = frozenset(
    f"{path}::{name}"
    for path, names in json.loads(FILE.read_text(encoding="utf-8")).items()
    for name in names
)
"""As "tests/distributed/test_contract.py::test_point[modes]"."""
NAMED_BY_FAULTS = frozenset(test for fault in CHOSEN for test in fault.tests)


@dataclass(frozen=True, slots=True)
class _Test:
    name: str


def left_out(tests: Iterable[str], commit: str) -> set[str]:
    """Those of `tests`, by their ids, that no chosen fault names and that belong to other commits than this one; all if
    `commit` is empty.
    """
    names = set(tests)
    if not commit:
        return names
    others = names - NAMED_BY_FAULTS
    return others - {test.name for test in tenth_of([_Test(name) for name in sorted(others)], commit)}
