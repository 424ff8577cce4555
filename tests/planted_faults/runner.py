"""Runs faults in copies of the package, some at a time, and keeps what came of each.

In: faults, the tests beside each. Out: a `Verdict` for each, also in a file, so that a run that was ended
goes on where it was. A test that notices a fault must pass without it (`baseline`).
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from tests.planted_faults.baseline import Baseline
from tests.planted_faults.fault import Fault, StaleFault
from tests.planted_faults.tree import FAILED, INTERRUPTED, TEST_LIMIT_SECONDS, Run, Tree, digest

KINDS = ("caught", "uncaught", "equivalent", "stale", "error")
# Each test has a limit of its own, so that this one is for many tests on a slow machine.
RUN_LIMIT_SECONDS = 1200.0
# A fault that is being judged when the budget ends may take so much longer.
GRACE_SECONDS = 120.0
_DISTRIBUTED = "tests/distributed/"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What came of a fault: `kind` is one of `KINDS`, `detail` the test that caught it, or why there is no
    answer.
    """

    name: str
    kind: str
    detail: str
    seconds: float

    def line(self) -> str:
        """For the log."""
        return f"{self.kind:10} {self.seconds:6.1f} s  {self.name}  {self.detail}"


@dataclass(slots=True)
class State:
    """Verdicts of earlier runs by key, in a file of one JSON line each; None keeps nothing."""

    path: Path | None
    known: dict[str, Diagnosis] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                self.known[entry["key"]] = Diagnosis(**entry["diagnosis"])
            except (ValueError, KeyError, TypeError):
                continue  # a line that was being written when the run was ended

    def note(self, key: str, diagnosis: Diagnosis) -> None:
        """Keep a diagnosis."""
        self.known[key] = diagnosis
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": key, "diagnosis": asdict(diagnosis)}) + "\n")


def key_of(fault: Fault, source: str) -> str:
    """Of one fault under one state of the source and the tests."""
    return hashlib.sha256(
        "\0".join((source, fault.path, str(fault.start), fault.change, *fault.tests)).encode()
    ).hexdigest()


def stages_of(tests: Sequence[str]) -> list[list[str]]:
    """What one pytest runs: first what needs no ranks, as it is cheap."""
    parts = (
        [t for t in tests if not t.startswith(_DISTRIBUTED)],
        [t for t in tests if t.startswith(_DISTRIBUTED)],
    )
    return [part for part in parts if part]


def nearest_first(fault: Fault) -> list[str]:
    """Its tests; before the others those of the module that it is in, which are likely to notice."""
    module = fault.path.rpartition("/")[2].removesuffix(".py")
    return sorted(fault.tests, key=lambda test: module not in test.partition("::")[0].rpartition("/")[2])


def judge(
    tree: Tree, *, fault: Fault, baseline: Baseline | None = None, end: float = float("inf")
) -> Diagnosis | None:
    """Plant it, run its tests, take it out again, and run the test that noticed it once more without it.

    None if `end`, of `time.monotonic()`, came before an answer.
    """
    try:
        tree.plant(fault)
    except StaleFault as stale:
        return Diagnosis(fault.name, "stale", str(stale), 0.0)
    seconds = 0.0
    noticed: Run | None = None
    try:
        for stage in stages_of(nearest_first(fault)):
            left = end - time.monotonic()
            run = tree.pytest(["-x", *stage], max(1.0, min(RUN_LIMIT_SECONDS, left)))
            seconds += run.seconds
            if run.code in (FAILED, INTERRUPTED):
                noticed = run
                break
            if run.code is None and left < RUN_LIMIT_SECONDS:
                return None
            if run.code is None:
                # The machine was too slow, or the tests are too many.
                return Diagnosis(
                    fault.name, "error", f"its tests did not end within {RUN_LIMIT_SECONDS:.0f} s", seconds
                )
            if run.code != 0:
                return Diagnosis(fault.name, "error", f"pytest ended with {run.code}: {run.tail}", seconds)
    finally:
        tree.restore(fault.path)
    if noticed is None:
        return Diagnosis(fault.name, "uncaught", fault.change, seconds)
    why = baseline.why_not(tree, noticed, max(1.0, end - time.monotonic())) if baseline else ""
    if why is None:
        return None
    return Diagnosis(fault.name, "error" if why else "caught", why or _what_failed(noticed), seconds)


def run_faults(
    faults: Sequence[Fault],
    *,
    workers: int,
    state: State,
    baseline: Literal["all", "rest", "none"] = "all",
    budget_seconds: float = float("inf"),
) -> Iterator[Diagnosis]:
    """Verdicts as they come, those that are known already first; none of faults whose turn comes after the budget.

    Those that noticed a fault are run without it too: all, those that `make test` leaves out, or none.
    """
    end = time.monotonic() + budget_seconds
    source = digest()
    keys = {fault.name: key_of(fault, source) for fault in faults}
    assert len(keys) == len(faults), "two faults have one name"
    open_faults = []
    for fault in faults:
        known = state.known.get(keys[fault.name])
        if known is not None and known.kind != "error":
            yield Diagnosis(fault.name, known.kind, f"{known.detail} (known)", 0.0)
        else:
            open_faults.append(fault)
    if not open_faults:
        return
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder, ThreadPoolExecutor(workers) as pool:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(workers):
            trees.put(Tree(Path(folder) / str(number)))

        shared = Baseline(baseline)
        futures = [
            pool.submit(
                _acquired, trees, partial(judge, fault=fault, baseline=shared, end=end + GRACE_SECONDS)
            )
            for fault in open_faults
        ]
        try:
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                diagnosis = future.result()
                if time.monotonic() > end:
                    for other in futures:
                        other.cancel()
                if diagnosis is None:
                    continue
                state.note(keys[diagnosis.name], diagnosis)
                yield diagnosis
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


T = TypeVar("T")


def _acquired(trees: queue.SimpleQueue[Tree], use: Callable[[Tree], T]) -> T:
    """What comes of using one of the trees."""
    tree = trees.get()
    try:
        return use(tree)
    finally:
        trees.put(tree)


def _what_failed(run: Run) -> str:
    # Of cases that share their ranks, the first one may tell of the failure of another.
    patterns = (r"not run, as (\S+) has failed", r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$")
    found = next(
        (match for pattern in patterns if (match := re.search(pattern, run.output, re.MULTILINE))), None
    )
    if found is None and "Timeout" in run.output:
        return f"by a test that did not end within {TEST_LIMIT_SECONDS} s"
    return f"by {found[1] if found else run.tail}"
