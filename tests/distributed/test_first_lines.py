"""The first lines of a failed job are the cause, then place and cure, once for all ranks; what launchers say
of it comes after.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.runtime_jobs import WORKERS, run_job

WORKER = WORKERS / "first_lines_worker.py"
LAUNCHERS = ("mpirun", "torchrun")


def line_of(mark: str) -> int:
    lines = WORKER.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


# Of each failure: rank, cause, place, cure, number of tracebacks.
REFUSED = "DataDependentControlFlowError: the model is not one graph, Dynamo breaks it: control flow depends on the data"
FAILURES = {
    "user": (
        "rank 1",
        "KeyError: 'a mistake in the script'",
        f"{WORKER}:{line_of('RAISED')}, in main",
        None,
        1,
    ),
    "both": (
        "rank 0",
        "KeyError: 'a mistake in the script'",
        f"{WORKER}:{line_of('RAISED')}, in main",
        None,
        1,
    ),
    "refused": (
        "rank 0",
        REFUSED,
        f"{WORKER}:{line_of('REFUSED')}, in forward",
        "write it with torch.where",
        0,
    ),
    "option": (
        "rank [01]",
        "UnknownOptionError: unknown option 'partition_nom' (from options)",
        "options",
        "did you mean",
        0,
    ),
    "memory": (
        "rank 1",
        "OutOfMemoryError: CUDA out of memory.",
        "first_lines_worker.py",
        "more micro-batches",
        1,
    ),
    "kill": ("rank 1", "ended without a word", None, "the kernel's log", 0),
}
CASES = [(how, launcher) for how in FAILURES for launcher in LAUNCHERS]
SOME = [("option", "mpirun"), ("user", "torchrun")]


@pytest.mark.parametrize(("how", "launcher"), mostly(CASES, SOME))
def test_the_first_lines_are_the_cause(tmp_path: Path, how: str, launcher: str) -> None:
    job = run_job(tmp_path, 2, "first_lines_worker", how, str(tmp_path), launcher=launcher, limit_seconds=90)
    rank, cause, place, cure, num_tracebacks = FAILURES[how]
    assert job.code not in (0, None), job.output
    # What is said of a plan that works is no part of the end.
    lines = [
        line
        for line in job.output.splitlines()
        if line.strip() and not line.startswith(("[rannc rank 0]", "W1", "E1"))
    ]
    expected = [
        rf"\[rannc\] (the job has ended because of )?{rank} of 2 .*",
        rf"\[rannc\]   cause +{re.escape(cause)}.*",
    ]
    expected += [] if place is None else [rf"\[rannc\]   at +.*{re.escape(place)}.*"]
    expected += [] if cure is None else [rf"\[rannc\]   cure +.*{re.escape(cure)}.*"]
    for pattern, line in zip(expected, lines, strict=False):
        assert re.fullmatch(pattern, line), f"{pattern}\n{job.output}"
    own = job.output.split("torch/distributed/elastic")[0]
    assert own.count("Traceback (most recent call last)") == num_tracebacks, job.output
    assert sum(line.startswith("[rannc]   cause") for line in lines) == 1, job.output
    if launcher == "torchrun" and how != "kill":
        assert cause in job.output.split("Root Cause")[1], "torchrun's own account has the cause, too"
