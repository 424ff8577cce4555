"""`rannc doctor` with two ranks on this host: a message and an all-reduce are timed, and a job whose rank dies must end.

In: a launcher's command, the environment, a limit. Out: `Finding`s. The ranks run doctor_job.py; a job that does not end within the limit
is ended here with all its processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rannc_backend.doctor import Finding

_MOST_ABORT_SECONDS = 20.0
_SLOW_BYTES_PER_SECOND = 1e8
_BYTES_PER_GB = 1e9  # as links are measured
_TAIL_LINES = 6
_POLL_SECONDS = 0.02
# Left by a launcher that this process runs under; its ranks are not ours.
_LAUNCHED = re.compile(
    r"^(PMI_|PMIX_|HYDI_|MPI_LOCAL|OMPI_COMM_WORLD_|OMPI_UNIVERSE|SLURM_(PROCID|STEP_|LOCALID|NODEID)|TORCHELASTIC_|GROUP_|LOCAL_|ROLE_)"
    r"|^(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)
# What is said by a job that does not start, and what helps.
_CURES = (
    (
        r"allow-run-as-root|run as root|running mpirun as root|executed as root",
        "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or run as another user.",
    ),
    (
        r"not enough slots|slots available",
        "set PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe (Open MPI 5) or OMPI_MCA_rmaps_base_oversubscribe=1 (4).",
    ),
    (r"No module named 'rannc_backend'", "install rannc-backend for the Python that the ranks start, too."),
    (r"No module named 'mpi4py'|MPI cannot be|load MPI", "install mpi4py for the MPI of this mpirun."),
    (r"getaddrinfo|Name or service not known|Temporary failure in name resolution", "give this host's name an address in /etc/hosts."),
    (r"No space left|Bus error|shm", "give the ranks more of /dev/shm (containers: --shm-size=1g)."),
    (r"NCCL", "run again with NCCL_DEBUG=INFO; with CUDA_VISIBLE_DEVICES= the ranks compute on the CPU."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `code`: its exit code; None: it was ended here, at the limit. `answer`: what its ranks wrote, if anything."""

    code: int | None
    seconds: float
    end_time: float
    output: str
    answer: Mapping[str, Any] | None

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self.output.strip().splitlines()[-_TAIL_LINES:])


RunJob = Callable[[str], JobResult]
"""Runs "measure" or "abort"."""


def rank_findings(run_job: RunJob) -> Iterator[Finding]:
    """Two jobs of two ranks each; the second only if the first has worked."""
    measured = list(measured_findings(run_job("measure")))
    yield from measured
    if measured[0].status != "problem":
        yield abort_finding(run_job("abort"))


def measured_findings(result: JobResult) -> Iterator[Finding]:
    """What the job "measure" shows."""
    answer = result.answer
    if result.code != 0 or answer is None:
        text = "did not end in time" if result.code is None else f"ended with exit code {result.code}"
        tail = f":\n{result.tail}" if result.tail else ""
        yield Finding(name="two ranks", status="problem", text=f"a job of two ranks {text}{tail}", cure=cure_of(result.output))
        return
    if answer.get("num_ranks") != 2:
        cure = "the launcher and the ranks' MPI do not belong together: see MPI above."
        yield Finding(name="two ranks", status="problem", text="each of two ranks believes to be alone", cure=cure)
        return
    text = f"started with {answer['launcher']} on {answer['device']} in {result.seconds:.1f} s"
    yield Finding(name="two ranks", status="ok", text=text)
    yield _transfer_finding("message", answer["message"])
    if not answer["sum_is_right"]:
        cure = "report this with the output of `rannc doctor --json`."
        yield Finding(name="all-reduce", status="problem", text="the sum of two ranks' numbers is wrong", cure=cure)
        return
    yield _transfer_finding("all-reduce", answer["allreduce"])


def abort_finding(result: JobResult) -> Finding:
    """What the job "abort" shows."""
    if result.answer is None:
        return Finding(name="abort", status="problem", text=f"the test did not run:\n{result.tail}", cure=cure_of(result.output))
    seconds = result.end_time - float(result.answer["time"])
    if result.code is None or seconds > _MOST_ABORT_SECONDS:
        text = f"a job went on for {seconds:.0f} s after one of its ranks had died"
        cure = "let the scheduler limit the time of jobs, and report this with the output of `rannc doctor --json`."
        return Finding(name="abort", status="problem", text=text, cure=cure)
    if result.code == 0:
        text = f"a job whose rank died ended after {seconds:.1f} s as if all were well (exit code 0)"
        return Finding(name="abort", status="problem", text=text, cure="use another launcher: schedulers would not see failures.")
    text = f"a job ended {seconds:.1f} s after one of its ranks had died, with exit code {result.code}"
    return Finding(name="abort", status="ok", text=text)


def cure_of(output: str) -> str:
    """What helps against what a job has said."""
    for pattern, cure in _CURES:
        if re.search(pattern, output, re.IGNORECASE):
            return cure
    return "start two ranks by hand (mpirun -np 2 python -m rannc_backend.doctor_job measure answer.json) and read what they say."


def _transfer_finding(name: str, seconds: Mapping[str, float]) -> Finding:
    rate = seconds["large_bytes"] / max(seconds["large"], 1e-9)
    text = f"latency {seconds['small'] * 1e6:.0f} us, {rate / _BYTES_PER_GB:.2f} GB/s for {seconds['large_bytes'] / 2**20:.0f} MB"
    if rate < _SLOW_BYTES_PER_SECOND:
        cure = "see whether other programs use the cores, and which network interface is taken (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
        return Finding(name=name, status="warning", text=f"slow: {text}", cure=cure)
    return Finding(name=name, status="ok", text=text)


def launch_command(mpirun: str | None) -> list[str]:
    """What starts two ranks of a module on this host."""
    if mpirun is not None:
        return [mpirun, "-np", "2", sys.executable, "-m", "rannc_backend.doctor_job"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rannc_backend.doctor_job"]


def rank_environment(environ: Mapping[str, str], *, num_devices: int) -> dict[str, str]:
    """The environment of the ranks: no other launcher's, one thread each, and the CPU where there are fewer devices than ranks."""
    kept = {name: value for name, value in environ.items() if not _LAUNCHED.match(name)}
    kept.setdefault("OMP_NUM_THREADS", "1")
    if num_devices < 2:
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def run_job(task: str, command: Sequence[str], environ: Mapping[str, str], *, limit_seconds: float) -> JobResult:
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
        answer = json.loads(file.read_text(encoding="utf-8")) if file.exists() and file.stat().st_size else None
    return JobResult(code=code, seconds=end - started, end_time=end, output=text, answer=answer)


def has_ended(process: subprocess.Popen[bytes], limit_seconds: float) -> bool:
    """Whether a process ends within the limit. It is not waited for yet: until then no other can have its number, or its group's."""
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
