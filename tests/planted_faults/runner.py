"""Runs faults in copies of the package, some at a time, and keeps what came of each.

In: faults, the tests beside each. Out: a `Verdict` for each, also in a file, so that a run that was ended
goes on where it was. The tests must pass where no fault is planted: they are run once without any.
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

from tests.planted_faults.fault import Fault, StaleFault
from tests.planted_faults.tree import FAILED, INTERRUPTED, NONE_CHOSEN, TEST_LIMIT_SECONDS, Run, Tree, digest

KINDS = ("caught", "uncaught", "equivalent", "stale", "error")
# Each test has a limit of its own, so that this one is for many tests on a slow machine.
RUN_LIMIT_SECONDS = 1200.0
# A fault that is being judged when the budget ends may take so much longer.
GRACE_SECONDS = 120.0
BASELINE_LIMIT_SECONDS = 1800.0
_DISTRIBUTED = "tests/distributed/"
# What the marks of tests that `make test` leaves out are, for pytest's `-m`.
NOT_BY_DEFAULT = "full or sampled"


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


def failing_tests(tree: Tree, stage: Sequence[str], marked: str | None = None) -> dict[str, str]:
    """Those tests that do not pass as the source is, with why; `marked` chooses among them, as pytest's `-m`."""
    if not stage:
        return {}
    run = tree.pytest(stage if marked is None else ["-m", marked, *stage], BASELINE_LIMIT_SECONDS)
    if run.code == 0 or (run.code == NONE_CHOSEN and marked is not None):
        return {}
    # pytest runs nothing where it does not know one of them, and shortens their names.
    if unknown := [test for test in stage if "not found: " in run.output and not _is_known(tree, test)]:
        rest = failing_tests(tree, [test for test in stage if test not in unknown], marked)
        return {test: "is no test" for test in unknown} | rest
    named = re.findall(r"^(?:FAILED|ERROR:?) (?:not found: )?(\S+?\.py(?:::\S+)?)", run.output, re.MULTILINE)
    named = [re.sub(r"^.*?(?=tests/)", "", name) for name in named]
    found: dict[str, str] = {}
    for test in stage:
        if (
            any(name == test or name.startswith((f"{test}::", f"{test}[")) for name in named)
            or run.code != FAILED
        ):
            found[test] = f"does not pass without the fault (exit code {run.code}): {_tail(run.output)}"
    return found


def _is_known(tree: Tree, test: str) -> bool:
    return tree.pytest(["--collect-only", test], BASELINE_LIMIT_SECONDS).code == 0


def nearest_first(fault: Fault) -> list[str]:
    """Its tests; before the others those of the module that it is in, which are likely to notice."""
    module = fault.path.rpartition("/")[2].removesuffix(".py")
    return sorted(fault.tests, key=lambda test: module not in test.partition("::")[0].rpartition("/")[2])


def judge(tree: Tree, *, fault: Fault, end: float = float("inf")) -> Diagnosis | None:
    """Plant it, run its tests, take it out again; None if `end`, of `time.monotonic()`, came before an answer."""
    try:
        tree.plant(fault)
    except StaleFault as stale:
        return Diagnosis(fault.name, "stale", str(stale), 0.0)
    seconds = 0.0
    try:
        for stage in stages_of(nearest_first(fault)):
            left = end - time.monotonic()
            run = tree.pytest(["-x", *stage], max(1.0, min(RUN_LIMIT_SECONDS, left)))
            seconds += run.seconds
            if run.code in (FAILED, INTERRUPTED):
                return Diagnosis(fault.name, "caught", _what_failed(run), seconds)
            if run.code is None and left < RUN_LIMIT_SECONDS:
                return None
            if run.code is None:
                # The machine was too slow, or the tests are too many.
                return Diagnosis(
                    fault.name, "error", f"its tests did not end within {RUN_LIMIT_SECONDS:.0f} s", seconds
                )
            if run.code != 0:
                return Diagnosis(
                    fault.name, "error", f"pytest ended with {run.code}: {_tail(run.output)}", seconds
                )
    finally:
        tree.restore(fault.path)
    return Diagnosis(fault.name, "uncaught", fault.change, seconds)


def run_faults(
    faults: Sequence[Fault],
    *,
    workers: int,
    state: State,
    baseline: Literal["all", "rest", "none"] = "all",
    budget_seconds: float = float("inf"),
) -> Iterator[Diagnosis]:
    """Verdicts as they come, those that are known already first; none of faults whose turn comes after the budget.

    Without a fault, `baseline` runs all of their tests, those that `make test` leaves out, or none.
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

        wrong: dict[str, str] = {}
        if baseline != "none":
            marked = NOT_BY_DEFAULT if baseline == "rest" else None
            stages = stages_of(sorted({test for fault in open_faults for test in fault.tests}))
            for found in pool.map(
                lambda stage: _acquired(trees, lambda tree: failing_tests(tree, stage, marked)), stages
            ):
                wrong |= found
        futures = []
        for fault in open_faults:
            bad = [f"{test} {wrong[test]}" for test in fault.tests if test in wrong]
            if bad:
                yield Diagnosis(fault.name, "error", bad[0], 0.0)
            else:
                futures.append(
                    pool.submit(_acquired, trees, partial(judge, fault=fault, end=end + GRACE_SECONDS))
                )
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
    return f"by {found[1] if found else _tail(run.output)}"


def _tail(output: str) -> str:
    return " / ".join(output.strip().splitlines()[-3:])[-400:]
