"""Renders the runs of benchmarks as one page: `python -m scripts.benchmark_history [--output FILE]`.

In: docs/benchmarks/runs/, one JSON file per run, named `<date>_<name>.json`. Out: docs/benchmarks/history.md,
a table per benchmark, the latest run first. A run says what was measured, with which command, when, at which
commit, on which machine and under which conditions; what it says is checked.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs/benchmarks/runs"
PAGE = ROOT / "docs/benchmarks/history.md"
HEAD = """# History of benchmarks

Every run in `docs/benchmarks/runs/`, rendered by `make docs`. The pages [performance](../performance.md), [planning](../planning.md)
and [first contact](first_contact.md) have the current figures; this page has what they were. Values are in the order of the runs or cases
that the metric names. A date is that of the run or, where it was not written down, of the commit that noted it. Machines are shared
unless a run says otherwise: compare runs only under equal conditions.
"""
_TEXTS = ("benchmark", "command", "date", "commit", "machine", "conditions", "note")
_REQUIRED = ("benchmark", "command", "date", "machine", "conditions")
_RESULT = {"case": str, "metric": str, "unit": str, "values": list}


def check_run(run: Any, name: str) -> dict[str, Any]:
    """A run as it was read, or a ValueError that names the file and what is wrong with it."""
    if not isinstance(run, dict) or set(run) != {*_TEXTS, "results"}:
        raise ValueError(f"{name}: expected the members {', '.join((*_TEXTS, 'results'))}")
    if not all(isinstance(run[key], str) for key in _TEXTS) or not all(run[key] for key in _REQUIRED):
        raise ValueError(f"{name}: {', '.join(_REQUIRED)} must be texts, {', '.join(_TEXTS)} may be empty")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]) or not name.startswith(f"{run['date']}_"):
        raise ValueError(f"{name}: the file's name must begin with the date {run['date']!r} (YYYY-MM-DD)")
    if run["commit"] and not re.fullmatch(r"[0-9a-f]{7,40}", run["commit"]):
        raise ValueError(f"{name}: {run['commit']!r} is not a commit")
    if not isinstance(run["results"], list) or not run["results"]:
        raise ValueError(f"{name}: there are no results")
    for result in run["results"]:
        is_whole = isinstance(result, dict) and set(result) == set(_RESULT)
        if not is_whole or not all(isinstance(result[key], kind) for key, kind in _RESULT.items()):
            raise ValueError(f"{name}: a result has {', '.join(_RESULT)}; this one is {result}")
        if not result["values"] or not all(type(value) in (int, float) for value in result["values"]):
            raise ValueError(f"{name}: values must be numbers, got {result['values']}")
    return run


def read_runs(folder: Path = RUNS) -> list[dict[str, Any]]:
    """All runs of a folder, by benchmark, the latest first."""
    runs = [
        check_run(json.loads(path.read_text(encoding="utf-8")), path.name)
        for path in sorted(folder.glob("*.json"))
    ]
    runs.sort(key=lambda run: run["date"], reverse=True)
    return sorted(runs, key=lambda run: run["benchmark"])


def history(runs: Iterable[dict[str, Any]]) -> str:
    """The page of all runs."""
    parts = [HEAD]
    for benchmark, same in groupby(runs, key=lambda run: run["benchmark"]):
        parts.append(f"## {benchmark}\n")
        parts += [_section(run) for run in same]
    return "\n".join(parts)


def _section(run: dict[str, Any]) -> str:
    commit = f", {run['commit']}" if run["commit"] else ""
    note = f" {run['note']}" if run["note"] else ""
    rows = "".join(
        f"| {result['case']} | {result['metric']} | {_values(result)} |\n" for result in run["results"]
    )
    return (
        f"**{run['date']}{commit}**: `{run['command']}`. {run['machine']}; {run['conditions']}.{note}\n\n"
        f"| case | metric | values |\n|---|---|---|\n{rows}"
    )


def _values(result: dict[str, Any]) -> str:
    unit = f" {result['unit']}" if result["unit"] else ""
    return (
        ", ".join(f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in result["values"])
        + unit
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.parse_args().output.write_text(history(read_runs()), encoding="utf-8")


if __name__ == "__main__":
    main()
