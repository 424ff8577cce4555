"""Writes `tests/sampled.json`, the tests of which each commit runs a tenth, from a measured run.

    make test-full PYTEST_ARGS="-n 2 -m 'not full' --durations=0" | tee seconds.log
    python -m scripts.sample_tests seconds.log

or, with a log of `make test`, `--add`: what is sampled already stays so.

What stays in `make test`: every test that is quick; every case that a chosen fault names, as it is known to notice
something that others do not, but for those that take very long, which `.ci/run` runs; the tests of the layout; and of
each file, the quickest case of each test first, as many as the same number of seconds holds, which is as large as the
share of the whole that stays allows. It is decided by seconds of one run, so that the list is made anew only when
`make test` has become too slow.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tests.only_in_full import ONLY_IN_FULL
from tests.sampled import FILE, NAMED_BY_FAULTS, SAMPLED

QUICK_SECONDS = 0.7
LONG_SECONDS = 10.0
SHARE = 0.3
_LINE = re.compile(r"^(\d+\.\d+)s (?:setup|call|teardown)\s+(tests/\S.*)$", re.MULTILINE)


def seconds_of(log: str) -> dict[str, float]:
    """Seconds of each test in what pytest prints with `--durations=0`."""
    found: dict[str, float] = defaultdict(float)
    for seconds, test in _LINE.findall(log):
        found[test.strip()] += float(seconds)
    return dict(found)


def sampled_of(
    seconds: Mapping[str, float],
    needed: Collection[str],
    *,
    share: float,
    quick_seconds: float = QUICK_SECONDS,
) -> list[str]:
    """The tests that a tenth of the commits run, so that about `share` of the seconds stay; `needed` ones stay.

    Every file may use the same number of seconds: the largest with which the share is kept.
    """
    bounds = sorted({0.0, *itertools.accumulate(sorted(seconds.values()))})
    limit = share * sum(seconds.values())

    def left_out(place: int) -> list[str]:
        return _left_out(seconds, needed, bounds[place], quick_seconds)

    def is_too_much(place: int) -> bool:
        return sum(seconds.values()) - sum(seconds[test] for test in left_out(place)) > limit

    place = bisect.bisect_left(range(len(bounds)), True, key=is_too_much)
    return left_out(max(0, place - 1))


def _left_out(
    seconds: Mapping[str, float], needed: Collection[str], file_seconds: float, quick_seconds: float
) -> list[str]:
    files, cases = defaultdict(list), defaultdict(list)
    for test in seconds:
        files[test.partition("::")[0]].append(test)
        cases[test.partition("[")[0]].append(test)
    first = {min(members, key=lambda test: (seconds[test], test)) for members in cases.values()}
    found: list[str] = []
    for path, members in files.items():
        used, is_full = 0.0, False
        for test in sorted(members, key=lambda test: (test not in first, seconds[test], test)):
            stays = seconds[test] < quick_seconds or test in needed or path.count("/") == 1 or not used
            is_full = is_full or not stays and used + seconds[test] > file_seconds
            if stays or not is_full:
                used += seconds[test]
            else:
                found.append(test)
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
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of the seconds, which stays (default %(default)s)"
    )
    parser.add_argument("--add", action="store_true", help="keep the sampled tests that the log has not")
    chosen = parser.parse_args(arguments)
    seconds = seconds_of(chosen.log.read_text(encoding="utf-8", errors="replace"))
    needed = {test for test in NAMED_BY_FAULTS if seconds.get(test, 0.0) < LONG_SECONDS}
    before = sorted(SAMPLED - seconds.keys()) if chosen.add else []
    tests = before + [
        test
        for test in sampled_of(seconds, needed, share=chosen.share, quick_seconds=chosen.quick_seconds)
        if test not in ONLY_IN_FULL
    ]
    FILE.write_text(json.dumps(by_file(tests), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    left = sum(seconds.get(test, 0.0) for test in tests)
    print(
        f"{len(tests)} tests of {left:.0f} s are sampled; {sum(seconds.values()) - left:.0f} s of tests stay"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
