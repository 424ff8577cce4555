"""Runs the distributed cases of all selected tests when the first one is asked for, in groups of ranks, two
groups at a time.

In: the parameters `case` and `cases` of the collected tests. Out: fixture `outcome_of`: Case -> Outcome.
Terms: a *share* is what one group of ranks runs at most: cases of one `Case.group`, those of a model
together, as its reference is kept.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.harness.case import Case, Outcome
from tests.distributed.harness.launch import environment, run_cases
from tests.distributed.harness.template import Templates

# In a group of two ranks rank 0 plans while the other waits: two groups keep two cores busy. With several
# pytest workers one of them has all cases, and the others enough to do.
NUM_GROUPS_AT_A_TIME = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
# Starting a group takes some seconds, and the last one runs alone.
MAX_CASES_OF_A_SHARE = 32


def cases_of(item: pytest.Item) -> Iterator[Case]:
    """All cases that this test asks for."""
    parameters = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    if isinstance(parameters.get("case"), Case):
        yield parameters["case"]
    yield from parameters.get("cases", ())


def shares_of(cases: list[Case]) -> list[list[Case]]:
    """Each case in one share; those that take longest first, so that little is left to run alone, but after
    all that others need.
    """

    def kind(case: Case) -> tuple[bool, object]:
        return bool(case.needs), case.group

    shares = []
    for _, group in itertools.groupby(sorted(cases, key=lambda case: (kind(case), case.model)), key=kind):
        members = list(group)
        number = -(-len(members) // MAX_CASES_OF_A_SHARE)
        bounds = [len(members) * place // number for place in range(number + 1)]
        shares += [members[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return sorted(shares, key=lambda share: (bool(share[0].needs), -len(share) * share[0].world))


class Runs:
    """Outcomes of this session; all cases are begun when the first is asked for."""

    def __init__(
        self, items: list[pytest.Item], directory: Path, templates: Templates, *, stop_at_failure: bool
    ) -> None:
        self._stop_at_failure = stop_at_failure
        self._cases: dict[str, Case] = {}
        for item in items:
            for case in cases_of(item):
                assert self._cases.setdefault(case.name, case) == case, f"two cases are called {case.name}"
        self._futures: dict[str, Future[dict[str, Outcome]]] = {}
        self._directory, self._templates = directory, templates
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(NUM_GROUPS_AT_A_TIME)

    def __call__(self, case: Case) -> Outcome:
        assert self._cases.get(case.name) == case, (
            f"{case.name} is not among the parameters of a collected test"
        )
        if not self._futures:
            for number, share in enumerate(shares_of(list(self._cases.values()))):
                future = self._executor.submit(self._run, share, self._directory / f"share{number}")
                self._futures |= {member.name: future for member in share}
        return self._futures[case.name].result()[case.name]

    def _run(self, share: list[Case], directory: Path) -> dict[str, Outcome]:
        for name in {name for case in share for name in case.needs}:
            # Begun before this share.
            self._futures[name].result()
        return run_cases(share, directory, self._templates, self._stop, stop_at_failure=self._stop_at_failure)

    def seconds_of(self, item: pytest.Item) -> float:
        """What the cases of a test took in their ranks."""
        done = [
            future for case in cases_of(item) if (future := self._futures.get(case.name)) and future.done()
        ]
        outcomes = {name: outcome for future in done for name, outcome in future.result().items()}
        results = [outcomes[case.name].results for case in cases_of(item) if case.name in outcomes]
        return sum(max((rank["seconds"] for rank in ranks), default=0.0) for ranks in results)

    def end(self) -> None:
        """End what still runs."""
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def templates() -> Iterator[Templates]:
    """Processes from which the ranks of cases are forked."""
    found = Templates(environment({}))
    yield found
    found.end()


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, templates: Templates
) -> Iterator[Runs]:
    """Gives a case's outcome; runs all cases at the first call."""
    # With -x the cases after one that failed would be run for nothing.
    stop_at_failure = request.config.getoption("maxfail") == 1
    runs = Runs(
        request.session.items,
        tmp_path_factory.mktemp("distributed"),
        templates,
        stop_at_failure=stop_at_failure,
    )
    yield runs
    runs.end()


OutcomeOf = Callable[[Case], Outcome]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The duration of a test is that of its cases, not of the share that it had to wait for."""
    report = yield
    runs = item.funcargs.get("outcome_of") if isinstance(item, pytest.Function) else None
    if report.when == "call" and report.passed and runs is not None:
        report.duration = runs.seconds_of(item)
    return report


@pytest.hookimpl(trylast=True)  # once tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with cases come first, in the order in which their shares run, so that one is told of as soon as
    it can be.

    The first waits for a share of many cases, of which every one has its own limit.
    """
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    cases_by_item = {id(item): list(cases_of(item)) for item in own}
    shares = shares_of(list({case.name: case for cases in cases_by_item.values() for case in cases}.values()))
    number_by_case = {case.name: number for number, share in enumerate(shares) for case in share}
    last_share = {
        key: max(number_by_case[case.name] for case in cases) for key, cases in cases_by_item.items() if cases
    }
    for item in own:
        item.add_marker(pytest.mark.timeout(14_400 if id(item) in last_share else 1200))
    items.sort(key=lambda item: last_share.get(id(item), len(shares)))
