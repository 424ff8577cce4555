"""Writes `tests/sampled.json`, the tests of which each commit runs a tenth, from a measured run.

    make test-full PYTEST_ARGS="-n 2 -m 'not full' --durations=0" | tee seconds.log
    python -m scripts.sample_tests seconds.log

What stays in `make test`: every test that is quick; the quickest case of every test that has several; every case that
a chosen fault names, as it is known to notice something that others do not. Which cases are left is decided by seconds
of one run, so that the list is made anew only when `make test` has become too slow.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tests.only_in_full import ONLY_IN_FULL
from tests.planted_faults.chosen import CHOSEN
from tests.sampled import FILE

QUICK_SECONDS = 0.7
_LINE = re.compile(r"^(\d+\.\d+)s (?:setup|call|teardown)\s+(tests/\S.*)$", re.MULTILINE)


def seconds_of(log: str) -> dict[str, float]:
    """Seconds of each test in what pytest prints with `--durations=0`."""
    found: dict[str, float] = defaultdict(float)
    for seconds, test in _LINE.findall(log):
        found[test.strip()] += float(seconds)
    return dict(found)


def sampled_of(
    seconds: Mapping[str, float], needed: Collection[str], *, quick_seconds: float = QUICK_SECONDS
) -> list[str]:
    """The tests that a tenth of the commits run; `needed` are ids of tests, or of all cases of a test, that stay."""
    cases: dict[str, list[str]] = defaultdict(list)
    for test in seconds:
        cases[test.partition("[")[0]].append(test)
    found: list[str] = []
    for members in cases.values():
        kept = {min(members, key=lambda test: (seconds[test], test)), *needed}
        found += [test for test in members if seconds[test] >= quick_seconds and test not in kept]
    return sorted(found)


def by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    """The names of tests under their files."""
    found: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        path, _, name = test.partition("::")
        found[path].append(name)
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample_tests", description=__doc__.splitlines()[0]
    )
    parser.add_argument("log", type=Path, help="what pytest printed with --durations=0")
    parser.add_argument(
        "--quick-seconds", type=float, default=QUICK_SECONDS, help="tests below it stay (default %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    seconds = seconds_of(chosen.log.read_text(encoding="utf-8", errors="replace"))
    needed = {test for fault in CHOSEN for test in fault.tests}
    tests = [
        test
        for test in sampled_of(seconds, needed, quick_seconds=chosen.quick_seconds)
        if test not in ONLY_IN_FULL
    ]
    FILE.write_text(json.dumps(by_file(tests), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    left = sum(seconds[test] for test in tests)
    print(
        f"{len(tests)} tests of {left:.0f} s are sampled; {sum(seconds.values()) - left:.0f} s of tests stay"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
