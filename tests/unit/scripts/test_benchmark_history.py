"""The history of benchmarks: up to date, in order, and a run that does not say what it measured is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark_history import PAGE, check_run, history, read_runs

NAME = "2026-11-24_step.json"


def run(**changes: Any) -> dict[str, Any]:
    result = {"case": "small", "metric": "step", "unit": "s", "values": [0.5, 1]}
    given = {"benchmark": "step", "command": "bench", "date": "2026-11-24", "commit": "abcdef0"}
    return {
        **given,
        "machine": "2 cores",
        "conditions": "idle",
        "note": "Twice.",
        "results": [result],
        **changes,
    }


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == history(read_runs()), "run `make docs`"


def test_a_run_is_a_table() -> None:
    text = history([run()])
    assert text.endswith(
        "## step\n\n**2026-11-24, abcdef0**: `bench`. 2 cores; idle. Twice.\n\n"
        "| case | metric | values |\n|---|---|---|\n| small | step | 0.5, 1 s |\n"
    )


def test_runs_are_by_benchmark_and_the_latest_first(tmp_path: Path) -> None:
    for name, changes in {
        "2026-11-22_a": {"date": "2026-11-22", "command": "older"},
        "2026-11-24_a": {"command": "newer"},
        "2026-11-23_b": {"date": "2026-11-23", "benchmark": "alone", "command": "other"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run(**changes)), encoding="utf-8")
    assert [each["command"] for each in read_runs(tmp_path)] == ["other", "newer", "older"]
    text = history(read_runs(tmp_path))
    assert text.index("## alone") < text.index("## step") < text.index("newer") < text.index("older")
    assert text.count("## step") == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"date": "24 November"}, "YYYY-MM-DD"),
        ({"date": "2026-11-23"}, "begin with the date"),
        ({"commit": "main"}, "not a commit"),
        ({"machine": ""}, "must be texts"),
        ({"note": 1}, "must be texts"),
        ({"results": []}, "no results"),
        ({"results": [{"case": "x"}]}, "a result has"),
        ({"results": [{"case": "x", "metric": "y", "unit": "s", "values": [True]}]}, "must be numbers"),
        ({"results": [{"case": "x", "metric": "y", "unit": "s", "values": []}]}, "must be numbers"),
        ({"more": "x"}, "expected the members"),
    ],
)
def test_a_run_that_says_too_little_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_run(run(**changes), NAME)


def test_a_run_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match=NAME):
        check_run([], NAME)
    assert check_run(run(), NAME) == run()
