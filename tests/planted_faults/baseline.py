"""Whether the test that noticed a fault passes where none is planted: one that always fails notices nothing.

In: a copy of the package without a fault, and the test that failed in it with one. Out: why the fault counts as not
noticed, or nothing. Only this one test is run again, and once for all faults that it noticed.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Literal

from tests.planted_faults.tree import NONE_CHOSEN, NOT_FOUND, Run, Tree

# What the marks of tests that `make test` leaves out are, for pytest's `-m`.
NOT_BY_DEFAULT = "full or sampled"
LIMIT_SECONDS = 1200.0


def failed_tests(run: Run) -> list[str]:
    """What the first test that failed may be called, in the words of pytest's summary: "FAILED NAME - MESSAGE".

    A name may have " - " in it too, so that there may be several; none if pytest was ended before its summary.
    """
    found = re.search(r"^(?:FAILED|ERROR) (.+)$", run.output, re.MULTILINE)
    if found is None:
        return []
    parts = re.sub(r"^.*?(?=tests/)", "", found[1]).split(" - ")
    return [" - ".join(parts[:number]) for number in range(1, len(parts) + 1)]


@dataclass(slots=True)
class Baseline:
    """Runs tests without a fault: `which` of them, all, those that `make test` leaves out, or none."""

    which: Literal["all", "rest", "none"]
    _known: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def why_not(self, tree: Tree, failed: Run, limit_seconds: float = float("inf")) -> str | None:
        """Why what failed there does not notice a fault, "" if it does; None without an answer within the limit."""
        if self.which == "none":
            return ""
        for test in failed_tests(failed):
            with self._lock:
                known = self._known.get(test)
            if known is not None:
                return known
            marks = ["-m", NOT_BY_DEFAULT] if self.which == "rest" else []
            # A file whose import failed is a name without a test.
            whole = [] if "::" in test else ["--collect-only"]
            run = tree.pytest([*whole, *marks, test], min(limit_seconds, LIMIT_SECONDS))
            if run.code is None:
                return None
            if run.code == NOT_FOUND:
                continue
            passes = run.code == 0 or (run.code == NONE_CHOSEN and self.which == "rest")
            why = (
                "" if passes else f"{test} does not pass without the fault (exit code {run.code}): {run.tail}"
            )
            with self._lock:
                self._known[test] = why
            return why
        return ""
