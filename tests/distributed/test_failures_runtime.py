"""One rank fails: the job ends within 5 s, with an exit code other than 0, and its last block says who, where
and why.

The whole backend's failures are in test_failures.py; here it is the runtime alone, in every phase that it
knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.harness.launch import Process, launcher
from tests.distributed.runtime_jobs import WORKERS, Job, assert_ok, run_job

LIMIT_SECONDS = 5.0
PHASES = {
    "control": "step 1, stage {rank}, micro-batch 0, sizes",
    "receive": "step 1, stage {rank}, micro-batch 1, forward",
    "allreduce": "step 1, stage {rank}, all-reduce",
    "after": "after the last step",
    **dict.fromkeys(("before_lookup", "before_call", "before_start"), "before its first call"),
}
WITHOUT_A_WORD = "ended without a word"
LEFT = "it left the job"
ENDS = mostly([("raise", "ValueError: bad sample"), ("kill", WITHOUT_A_WORD)], [("kill", WITHOUT_A_WORD)])


def assert_ended(job: Job, rank: int, where: str, cause: str) -> None:
    """The job ended in time and badly, and the block, printed once and last, names rank, phase and cause."""
    assert job.code not in (0, None), (job.code, job.output[-3000:])
    assert job.seconds_after_fault is not None and job.seconds_after_fault < LIMIT_SECONDS, (
        job.seconds_after_fault
    )
    assert job.output.count("the job has ended because of") == 1, job.output[-3000:]
    assert f"because of rank {rank} " in job.block, job.block
    assert re.search(rf"in +{re.escape(PHASES[where].format(rank=rank))}", job.block), job.block
    assert cause in job.block, job.block
    tail = job.output.strip().splitlines()[-20:]
    assert any("the job has ended because of" in line for line in tail), job.output[-3000:]


@pytest.mark.parametrize(
    ("fault", "where", "cause"),
    [
        ("raise", "receive", "ValueError: bad sample"),
        pytest.param("raise", "after", "ValueError: bad sample", marks=pytest.mark.full),
        ("memory", "allreduce", "RANNC_PIPELINE_NUM"),
        pytest.param("exit3", "control", "sys.exit(3)", marks=pytest.mark.full),
        pytest.param("exit0", "control", LEFT, marks=pytest.mark.full),
        ("exit0", "receive", LEFT),
        pytest.param("exit0", "allreduce", LEFT, marks=pytest.mark.full),
        pytest.param("os_exit0", "receive", LEFT, marks=pytest.mark.full),
        ("os_exit5", "after", "os._exit(5)"),
        pytest.param("kill", "control", WITHOUT_A_WORD, marks=pytest.mark.full),
        # By default rank 0 of four ends so, and a rank under torchrun.
        pytest.param("kill", "receive", WITHOUT_A_WORD, marks=pytest.mark.full),
        pytest.param("kill", "after", WITHOUT_A_WORD, marks=pytest.mark.full),
        ("segfault", "allreduce", WITHOUT_A_WORD),
        ("term", "control", "received SIGTERM"),
        ("interrupt", "receive", "interrupted (Ctrl-C)"),
    ],
)
def test_a_failing_rank(tmp_path: Path, fault: str, where: str, cause: str) -> None:
    job = run_job(tmp_path, 2, "fault_worker", fault, where, "1", limit_seconds=40)
    assert_ended(job, 1, where, cause)
    tracebacks = job.output.count("Traceback (most recent call last)")
    assert tracebacks == (1 if fault in ("raise", "memory") else 0), job.output


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("raise_3", 3, "sys.exit(3)"),
        pytest.param("text", 1, "sys.exit('the reason why')", marks=pytest.mark.full),
        ("save", 1, "CheckpointWriteError: the checkpoint"),
    ],
)
def test_the_exit_code_is_kept(tmp_path: Path, how: str, code: int, cause: str) -> None:
    """Of a SystemExit that one rank's script does not catch, after others that it did; of a save in the
    background that failed.
    """
    job = run_job(tmp_path, 2, "exit_worker", how, *([] if how == "save" else ["1"]), limit_seconds=40)
    assert job.code == code, job.output
    assert cause in job.block and job.output.count("the job has ended because of") == 1, job.output
    if how == "save":
        assert "No space left on device" in job.block and 1 <= job.output.count("at exit") <= 2, job.output
    else:
        assert "because of rank 1 " in job.block


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("caught", 2),
        pytest.param("none", 2, marks=pytest.mark.full),
        pytest.param("atexit_hook", 2, marks=pytest.mark.full),
    ],
)
def test_an_exit_that_was_caught_is_none(tmp_path: Path, how: str, world: int) -> None:
    job = run_job(tmp_path, world, "exit_worker", how, limit_seconds=40)
    assert job.code == 0, job.output
    assert "[rannc]" not in job.output, job.output


@pytest.mark.parametrize(("how", "code"), mostly([("save", 1), ("save_told", 0)], [("save", 1)]))
def test_the_exit_code_of_one_process(tmp_path: Path, how: str, code: int) -> None:
    job = run_job(tmp_path, 1, "exit_worker", how, limit_seconds=40)
    assert job.code == code, job.output
    assert "No space left on device" in job.output and "at exit" in job.output, job.output
    assert ("told" in job.output) == (code == 0), job.output


@pytest.mark.parametrize(("fault", "cause"), ENDS)
def test_rank_0_of_4_fails(tmp_path: Path, fault: str, cause: str) -> None:
    job = run_job(tmp_path, 4, "fault_worker", fault, "receive", "0", limit_seconds=40)
    assert_ended(job, 0, "receive", cause)
    assert job.block.count("rank 3") == 1, "the others' phases are told once"


@pytest.mark.parametrize("fault", mostly(["raise", "exit0"], ["raise"]))
def test_a_rank_that_never_starts(tmp_path: Path, fault: str) -> None:
    job = run_job(tmp_path, 2, "fault_worker", fault, "before_start", "1", limit_seconds=40)
    assert_ended(job, 1, "before_start", "it ended, and the others cannot start without it")


@pytest.mark.parametrize(
    ("fault", "where"),
    mostly(
        [
            ("raise", "before_lookup"),
            ("exit3", "before_lookup"),
            ("raise", "before_call"),
            ("exit3", "before_call"),
        ],
        [("raise", "before_lookup"), ("exit3", "before_call")],
    ),
)
def test_a_rank_that_ends_while_the_others_are_busy(tmp_path: Path, fault: str, where: str) -> None:
    """They have looked the backend up, and would call it only later."""
    job = run_job(tmp_path, 3, "fault_worker", fault, where, "1", limit_seconds=40)
    assert_ended(job, 1, where, "it ended, and the others cannot start without it")


def test_a_rank_may_end_in_order_before_the_start(tmp_path: Path) -> None:
    assert_ok(run_job(tmp_path, 3, "runtime_worker", "leaving_before_the_start", limit_seconds=40), 3)


def test_a_rank_that_ended_in_order_is_named_once_the_others_wait(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "runtime_worker", "starting_without_another", limit_seconds=40)
    assert_ended(job, 1, "before_start", "it ended, and the others cannot start without it")


@pytest.mark.parametrize(
    ("fault", "where", "launcher", "cause"),
    [
        # Before anything of ours is there; after the look-up; within MPI_Init.
        ("stop", "before_lookup", "mpirun", "rank 1 is stopped"),
        ("loop", "before_call", "mpirun", "rank 1 has not called a compiled model"),
        pytest.param("stop_soon", "before_start", "mpirun", "rank 1 is stopped", marks=pytest.mark.full),
        pytest.param(
            "loop",
            "before_lookup",
            "mpirun",
            "rank 1 has not called a compiled model",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "loop", "before_start", "mpirun", "rank 1 has not called a compiled model", marks=pytest.mark.full
        ),
        pytest.param("stop", "before_start", "torchrun", "rank 1 is stopped", marks=pytest.mark.full),
    ],
)
def test_the_start_has_a_limit(tmp_path: Path, fault: str, where: str, launcher: str, cause: str) -> None:
    """MPI_Init holds the interpreter's lock: nothing inside of a rank could end it. The limit is 4 s in this
    worker.
    """
    before = _stopped_or_running("fault_worker.py")
    job = run_job(tmp_path, 3, "fault_worker", fault, where, "1", launcher=launcher, limit_seconds=40)
    assert job.seconds_after_fault is not None
    late = 4 + (3 if fault == "stop_soon" else 0)
    ended = Job(
        code=job.code,
        output=job.output if launcher == "mpirun" else job.block,
        seconds_after_fault=job.seconds_after_fault - late,
    )
    assert_ended(ended, 1, "before_start", cause)
    assert "RANNC_START_TIMEOUT_SECONDS" in job.block
    assert _stopped_or_running("fault_worker.py") <= before, "a rank is left over"


def _stopped_or_running(script: str) -> set[int]:
    """Processes of this user that run a script."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and script.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def test_a_frozen_rank_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, 3, "fault_worker", "stop", "receive", "1", limit_seconds=40)
    assert job.seconds_after_fault is not None
    # The limit of a wait in this worker is 4 s; what is tested is the time after it.
    late = Job(code=job.code, output=job.output, seconds_after_fault=job.seconds_after_fault - 4)
    assert_ended(late, 1, "receive", "no sign of life")


@pytest.mark.parametrize(("fault", "cause"), ENDS)
def test_torchrun(tmp_path: Path, fault: str, cause: str) -> None:
    job = run_job(tmp_path, 2, "fault_worker", fault, "receive", "1", launcher="torchrun", limit_seconds=40)
    # torchrun's own summary comes after ours, and must blame the same rank.
    ours = Job(code=job.code, output=job.block, seconds_after_fault=job.seconds_after_fault)
    assert_ended(ours, 1, "receive", cause)
    assert re.search(r"Root Cause.*?rank +: 1 ", job.output, re.DOTALL), job.output[-2000:]


def test_a_reported_failure(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "runtime_worker", "reported", limit_seconds=40)
    assert job.code not in (0, None)
    assert (
        "step 7, stage 1, micro-batch 2, backward" in job.block
        and "ValueError: reported, not raised" in job.block
    )


def test_a_thread_that_fails(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "runtime_worker", "thread_fails", limit_seconds=40)
    assert job.code not in (0, None)
    assert (
        "because of rank 1 " in job.block
        and "Before, it had: thread trainer: ValueError: in a thread" in job.block
    ), job.output


def test_a_forked_child_does_not_hide_the_end_of_its_parent(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "runtime_worker", "forked_child_outlives", limit_seconds=40)
    assert job.code not in (0, None)
    # Were rank 1's connection still open in its child, its end would go unnoticed until the child's.
    assert 0 < job.output.find("the job has ended") < job.output.find("child ends"), job.output
    assert "because of rank 1 " in job.block and WITHOUT_A_WORD in job.block, job.output


def test_values_that_one_rank_cannot_get_end_the_job(tmp_path: Path) -> None:
    """The other waits for them in the middle of a message, and cannot be told in any other way."""
    job = run_job(tmp_path, 2, "source_worker", limit_seconds=90)
    assert job.code not in (0, None), job.output
    assert "because of rank 0 " in job.block and "giving parameters to their owners" in job.block, job.output
    assert "gave no value for" in job.block and "ValueError: the disk is gone" in job.block, job.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_launcher_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C at the terminal, or a scheduler's SIGTERM: one message, prompt end, nothing left running."""
    script = str(WORKERS / "runtime_worker.py")
    with Process(
        [*launcher(2), sys.executable, script, "wait_for_a_message"], tmp_path / "log", {}
    ) as process:
        for _ in range(300):
            if process.tail().count("waiting") == 2:
                break
            time.sleep(0.1)
        time.sleep(0.3)
        begin = time.monotonic()
        os.kill(process.handle.pid, number)
        code = process.wait(20)
        seconds = time.monotonic() - begin
        output = process.tail()
    assert code not in (0, None), output
    assert seconds < LIMIT_SECONDS, (seconds, output)
    assert output.count("the job has ended because of") <= 1 and "Traceback" not in output, output


@pytest.mark.full
def test_starts_and_ends_cleanly_25_times(tmp_path: Path) -> None:
    """gloo's threads can abort a process that ends while they hold tensors; 10 of 25 did before the order of
    closing was found.
    """
    for world in (2, 4):
        for attempt in range(25):
            job = run_job(tmp_path, world, "runtime_worker", "messages", "groups", "keeps_everything")
            assert job.code == 0, (world, attempt, job.output[-3000:])
