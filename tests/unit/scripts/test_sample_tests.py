"""Which tests only a tenth of the commits run, and that ten commits run all of them."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from scripts.sample_tests import by_file, sampled_of, seconds_of
from tests.planted_faults import tenths
from tests.planted_faults.tree import ROOT
from tests.sampled import SAMPLED, left_out

LOG = """
============================= slowest durations ==============================
12.50s call     tests/distributed/test_a.py::test_many[a b-1]
3.00s setup    tests/distributed/test_a.py::test_many[a b-1]
0.90s call     tests/distributed/test_a.py::test_many[short]
9.00s call     tests/unit/test_b.py::test_alone
0.10s teardown tests/unit/test_b.py::test_alone
7209 passed, 3 skipped in 1562.18s
"""


def test_seconds_are_those_of_all_phases() -> None:
    assert seconds_of(LOG) == {
        "tests/distributed/test_a.py::test_many[a b-1]": 15.5,
        "tests/distributed/test_a.py::test_many[short]": 0.9,
        "tests/unit/test_b.py::test_alone": 9.1,
    }


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 5)).map(
            lambda parts: f"tests/unit/{parts[0]}.py::{parts[1]}[{parts[2]}]"
        ),
        st.floats(0, 20),
    ),
    st.floats(0.05, 1.0),
    st.data(),
)
def test_quick_tests_the_first_of_each_file_and_what_faults_name_stay(
    seconds: dict[str, float], share: float, data: st.DataObject
) -> None:
    needed = data.draw(st.sets(st.sampled_from(sorted(seconds)))) if seconds else set()
    sampled = set(sampled_of(seconds, needed, share=share, quick_seconds=1.0))
    stay = set(seconds) - sampled
    assert all(seconds[test] >= 1.0 for test in sampled) and not sampled & needed
    assert {test.partition("::")[0] for test in stay} == {test.partition("::")[0] for test in seconds}
    more = set(sampled_of(seconds, needed, share=min(1.0, 2 * share), quick_seconds=1.0))
    assert more <= sampled, "a larger share leaves out no other test"
    if not sampled:
        return
    # With no file's seconds spent, only those stay that always do; else the share is kept.
    least = {test for test in seconds if seconds[test] < 1.0 or test in needed}
    if sum(seconds[test] for test in stay) > share * sum(seconds.values()) + 1e-9:
        for path in {test.partition("::")[0] for test in seconds}:
            others = [test for test in stay - least if test.partition("::")[0] == path]
            assert len(others) <= 1


def test_each_test_has_a_case_before_any_has_a_second() -> None:
    seconds = {f"tests/unit/a.py::{name}[{case}]": 2.0 + case for name in "xy" for case in range(3)}
    sampled = sampled_of(seconds, set(), share=0.5, quick_seconds=1.0)
    assert sorted(set(seconds) - set(sampled)) == [
        "tests/unit/a.py::x[0]",
        "tests/unit/a.py::x[1]",
        "tests/unit/a.py::y[0]",
    ]
    layout = {
        "tests/test_architecture.py::test_types": 60.0,
        "tests/unit/a.py::x": 5.0,
        "tests/unit/a.py::y": 6.0,
    }
    assert sampled_of(layout, set(), share=0.1) == ["tests/unit/a.py::y"]


def test_names_stand_under_their_files() -> None:
    assert by_file(["b.py::y[1]", "a.py::x", "b.py::y[0::1]"]) == {"a.py": ["x"], "b.py": ["y[0::1]", "y[1]"]}


def test_ten_commits_run_all_and_each_a_tenth() -> None:
    tests = [f"t.py::case[{number}]" for number in range(57)]
    head = tenths._git("rev-parse", "HEAD") or "no commit"
    assert left_out(tests, "") == set(tests)
    run = set(tests) - left_out(tests, head)
    assert len(run) in (5, 6)
    if head == "no commit" or tenths._git("rev-parse", "--is-shallow-repository") != "false":
        return
    number = int(tenths._git("rev-list", "--first-parent", "--count", head))
    if number > 20:
        first = number % 10 + 10
        block = [tenths._git("rev-parse", f"HEAD~{back}") for back in range(first - 9, first + 1)]
        assert set().union(*(set(tests) - left_out(tests, commit) for commit in block)) == set(tests)


def test_a_commit_collects_its_tenth_beside_the_default() -> None:
    head = tenths._git("rev-parse", "HEAD") or "no commit"
    chosen = SAMPLED - left_out(SAMPLED, head)
    assert chosen, "fewer than ten tests are sampled"
    path = min(chosen).partition("::")[0]

    def collected(*arguments: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        run = subprocess.run(
            [*command, "-o", "addopts=--import-mode=importlib -m 'not full and not sampled'", "-q", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return {line for line in run.stdout.splitlines() if line.startswith(path + "::")}

    default, with_tenth = collected(), collected("--tenth", head)
    assert default and not default & SAMPLED
    assert with_tenth - default == {test for test in chosen if test.startswith(path + "::")}
