"""Failures end well: the job ends within 5 s with a non-zero code and says who failed; wrong input gets its
own error.

Jobs of their own (failing_job.py) for what ends a job; worker groups for errors that a user can catch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.failure_checks import REFUSED
from tests.distributed.harness.case import Case
from tests.distributed.harness.launch import run_script

JOB = Path(__file__).with_name("failing_job.py")
LIMIT_SECONDS = 60.0
ALLOWED_SECONDS = 5.0
NUM_LAST_LINES = 25
CAUSE = "the disk is on fire"

# (how, where, texts that the last lines must have)
INSIDE = ("rank 1", "stage 1", "micro-batch 1")
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("exception", "forward", (*INSIDE, CAUSE)),
    # It has not joined yet: the launcher speaks.
    ("kill", "before", ("signal 9",)),
    ("segfault", "backward", INSIDE),
    ("exception", "capture", ("rank 1", CAUSE)),
    # A label that there is no class for, and a script that skips bad batches: the other ranks are in the
    # midst of the step.
    ("caught", "data", ("rank 1", "stage 1", "micro-batch")),
)
# The runtime alone meets these kinds in test_failures_runtime.py.
JOBS_FULL: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("kill", "forward", INSIDE),
    ("exception", "data", ("rank 1", "stage 1", "micro-batch")),
    ("exception", "backward", (*INSIDE, CAUSE)),
    ("exit", "forward", (*INSIDE, "exit")),
    ("stop", "forward", ("rank 1", "stage 1")),
    ("exception", "between", ("rank 1", CAUSE)),
    ("exit_0", "between", ("rank 1",)),
    ("memory", "forward", (*INSIDE, CAUSE)),
    ("kill", "between", ("rank 1",)),
    ("kill", "backward", INSIDE),
    ("exception", "before", ("rank 1", CAUSE)),
    ("exit", "capture", ("rank 1",)),
    ("exit", "backward", (*INSIDE, "exit")),
)


def run_job(how: str, where: str, texts: tuple[str, ...], world: int, rank: int, directory: Path) -> None:
    stamp = directory / "stamp"
    arguments = [
        "--how",
        how,
        "--where",
        where,
        "--rank",
        str(rank),
        "--stamp",
        str(stamp),
        "--world",
        str(world),
    ]
    code, output, _ = run_script(
        JOB, arguments, world=world, directory=directory, limit_seconds=LIMIT_SECONDS
    )
    ended = time.time()
    assert stamp.exists(), f"the failure was never reached:\n{output[-4000:]}"
    assert code is not None, f"the job still ran after {LIMIT_SECONDS:.0f} s:\n{output[-4000:]}"
    assert code != 0, f"the job ended with code 0:\n{output[-4000:]}"
    # A frozen rank is seen by the limit of a step, 5 s in this job.
    allowed = ALLOWED_SECONDS + (5.0 if how == "stop" else 0.0)
    seconds = ended - float(stamp.read_text())
    last_lines = "\n".join(output.strip().split("\n")[-NUM_LAST_LINES:])
    assert seconds <= allowed, f"the job ended {seconds:.1f} s after the failure:\n{last_lines}"
    for text in texts:
        assert text in last_lines, f"{text!r} is not in the last lines:\n{last_lines}"


def _ids(jobs: tuple[tuple[str, str, tuple[str, ...]], ...]) -> list[str]:
    return [f"{how}-{where}" for how, where, _ in jobs]


@pytest.mark.parametrize(("how", "where", "texts"), JOBS, ids=_ids(JOBS))
def test_job_ends_soon_and_says_why(how: str, where: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    run_job(how, where, texts, 2, 1, tmp_path)


@pytest.mark.full
def test_a_middle_stage_of_four(tmp_path: Path) -> None:
    run_job("exception", "forward", ("rank 2", "stage 2", "micro-batch 1", CAUSE), 4, 2, tmp_path)


# By default test_failures_runtime.py ends rank 0.
@pytest.mark.full
def test_rank_0_is_no_exception(tmp_path: Path) -> None:
    run_job("kill", "forward", ("rank 0", "stage 0"), 2, 0, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("how", "where", "texts"), JOBS_FULL, ids=_ids(JOBS_FULL))
def test_job_ends_soon_and_says_why_full(
    how: str, where: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    run_job(how, where, texts, 2, 1, tmp_path)


@pytest.mark.full
def test_the_job_without_a_failure_ends_with_zero(tmp_path: Path) -> None:
    code, output, _ = run_script(
        JOB, ["--steps", "4", "--world", "2"], world=2, directory=tmp_path, limit_seconds=LIMIT_SECONDS
    )
    assert code == 0 and output.count("trained 4 steps") == 2, output[-4000:]


def _case(name: str, world: int, check: str, **members: Any) -> Case:
    defaults = {"rows": (4,) * world, "replicas": ",".join(["1"] * world)}
    return Case(name=f"failure-{name}", world=world, check=check, **(defaults | members))


INPUTS = (
    *(_case(f"refused-{name}", 1, "refused", parameters={"name": name}) for name in REFUSED),
    *(
        _case(f"refused-{name}-ranks", 2, "refused", parameters={"name": name})
        for name in ("cumsum", "break")
    ),
    _case("wrong_options", 1, "wrong_options", replicas=""),
    _case("wrong_options_ranks", 2, "wrong_options", replicas=""),
    _case("too_few_rows", 2, "too_few_rows", replicas="2"),
    _case("second_derivative", 2, "second_derivative", model="mlp_loss"),
    _case("inputs_disagree", 1, "inputs_disagree", model="mlp_loss"),
    *(
        _case(f"ranks_differ-{what}", 2, "ranks_differ", parameters={"what": what}, replicas="")
        for what in ("layers", "frozen", "options")
    ),
    _case("ranks_differ-four", 4, "ranks_differ", parameters={"what": "layers"}, replicas=""),
)


INPUTS_FULL = tuple(
    _case(f"ranks_differ-{what}", 2, "ranks_differ", parameters={"what": what}, replicas="")
    for what in ("widths", "activation")
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name.removeprefix("failure-"),
            marks=[pytest.mark.full] if case in INPUTS_FULL else [],
        )
        for case in (*INPUTS, *INPUTS_FULL)
    ],
)
def test_wrong_input_has_its_own_error(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
