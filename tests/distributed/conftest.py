"""Runs the distributed cases of all selected tests, one group of ranks per world size, when the first one is asked for.

In: the parameters `case` and `cases` of the collected tests. Out: fixture `outcome_of`: Case -> Outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.harness.case import Case, Outcome
from tests.distributed.harness.launch import run_cases


def cases_of(items: list[pytest.Item]) -> Iterator[Case]:
    """All cases that these tests ask for."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if isinstance(parameters.get("case"), Case):
            yield parameters["case"]
        for case in parameters.get("cases", ()):
            yield case


class Runs:
    """Outcomes of this session; a group of ranks runs when the first of its cases is asked for."""

    def __init__(self, items: list[pytest.Item], directory: Path) -> None:
        self._waiting = {case.name: case for case in cases_of(items)}
        self._outcomes: dict[str, Outcome] = {}
        self._directory = directory

    def __call__(self, case: Case) -> Outcome:
        if case.name not in self._outcomes:
            assert self._waiting[case.name] == case, f"two cases are called {case.name}"
            members = [other for other in self._waiting.values() if other.group == case.group]
            self._outcomes |= run_cases(members, self._directory / f"group{len(self._outcomes)}")
        return self._outcomes[case.name]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Gives a case's outcome; runs all cases of its group at the first call."""
    return Runs(request.session.items, tmp_path_factory.mktemp("distributed"))


OutcomeOf = Callable[[Case], Outcome]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a group waits for the whole group; the groups have limits of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            limit = 14_400 if item.get_closest_marker("full") else 1200
            item.add_marker(pytest.mark.timeout(limit))
