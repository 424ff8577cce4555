"""`rannc doctor` with ranks: they connect, a message and an all-reduce are timed, a job whose rank dies ends,
a small model trains.

In: a launcher's command, the environment, a limit. Out: `Finding`s. The ranks run job.py; a job that does not
end within the limit is ended here with all its processes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rannc_backend.doctor.answers import (
    JobResult,
    abort_finding,
    measured_findings,
    printed_answer,
    training_finding,
)
from rannc_backend.doctor.findings import Finding
from rannc_backend.errors import OptionValueError
from rannc_backend.runtime.launch import without_launch
from rannc_backend.settings.options import ENVIRONMENT_PREFIX

_NEEDED = ("two ranks", "connections")  # without these there is no job
_POLL_SECONDS = 0.02
RunJob = Callable[[str], JobResult]
"""Runs "measure", "abort" or "train"."""


def rank_findings(run_job: RunJob) -> Iterator[Finding]:
    """Three jobs; the later ones only if the first has worked."""
    result = run_job("measure")
    measured = [_with_output(finding, result) for finding in measured_findings(result)]
    yield from measured
    if any(finding.status == "problem" and finding.name in _NEEDED for finding in measured):
        return
    for task, finding_of in (("abort", abort_finding), ("train", training_finding)):
        result = run_job(task)
        yield _with_output(finding_of(result), result)


def _with_output(finding: Finding, result: JobResult) -> Finding:
    return replace(finding, details=result.output) if finding.status == "problem" else finding


def words_of_launch(launch: str) -> list[str]:
    """The words of a command that starts ranks, as the user gives it with ``--launch``.

    Raises:
        OptionValueError: it is no command.
    """
    try:
        words = shlex.split(launch)
    except ValueError:
        words = []
    if not words or shutil.which(words[0]) is None:
        expected = (
            "a command that starts ranks and is in PATH, as 'mpirun -np 2 -hosts a,b' or 'srun -N 2 -n 2'"
        )
        raise OptionValueError("--launch", value=launch, source="command line", expected=expected)
    return words


def launch_command(mpirun: str | None, launch: str = "") -> list[str]:
    """What starts ranks of the job: as the user has said, else two of them on this host.

    Raises:
        OptionValueError: what the user has said is no command.
    """
    job = [sys.executable, "-m", "rannc_backend.doctor.job"]
    if launch:
        return [*words_of_launch(launch), *job]
    if mpirun is not None:
        return [mpirun, "-np", "2", *job]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rannc_backend.doctor.job",
    ]


def rank_environment(environ: Mapping[str, str], *, num_devices: int) -> dict[str, str]:
    """The environment of the ranks: no other launcher's, one thread each, and the CPU where there are fewer
    devices than ranks.

    Nor the user's options, which `check_configuration` looks at: they may name plans and files that are for
    another model.
    """
    kept = {
        name: value
        for name, value in without_launch(environ).items()
        if not name.startswith(ENVIRONMENT_PREFIX)
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    if num_devices < 2:
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def run_job(
    task: str, command: Sequence[str], environ: Mapping[str, str], *, limit_seconds: float
) -> JobResult:
    """Run a job, at most so long; whatever happens, none of its processes is left."""
    with tempfile.TemporaryDirectory(prefix="rannc_doctor_") as folder:
        file = Path(folder, "answer.json")
        started = time.time()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [*command, task, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
            in_time = False
            try:
                in_time = has_ended(process, limit_seconds)
            finally:
                ended_with = _end_group(process)
            code = ended_with if in_time else None
            end = time.time()
            output.seek(0)
            text = output.read(2**20).decode("utf-8", errors="replace")
        answer = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.exists() and file.stat().st_size
            else printed_answer(text)
        )
    return JobResult(code=code, seconds=end - started, end_time=end, output=text, answer=answer)


def has_ended(process: subprocess.Popen[bytes], limit_seconds: float) -> bool:
    """Whether a process ends within the limit. It is not waited for yet: until then no other can have its
    number, or its group's.
    """
    if not hasattr(os, "waitid"):  # macOS
        try:
            return process.wait(limit_seconds) is not None
        except subprocess.TimeoutExpired:
            return False
    until = time.monotonic() + limit_seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """End all processes of a group that may have ended by itself, and give the first one's exit code."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.wait()
