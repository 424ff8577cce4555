"""What the jobs of `rannc doctor` show: from how a job ended, and what its ranks answered, to findings.

In: `JobResult`s. Out: `Finding`s. Nothing here needs torch, so that a doctor who finds none can say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rannc_backend.doctor.findings import Finding

ANSWER_MARK = "rannc-doctor-answer "
_MAX_ABORT_SECONDS = 20.0
_SLOW_BYTES_PER_SECOND = 1e8
_BYTES_PER_GB = 1e9  # as links are measured
_TAIL_LINES = 6
_MAX_NAMED = 4
# What torchrun, Hydra, Open MPI and Slurm begin with when they tell that a rank has ended.
_EPILOGUE = re.compile(
    r"torch/distributed/elastic/|elastic\.multiprocessing|^=+$|BAD TERMINATION|^-{20,}$|prterun|mpirun (noticed|detected)|^srun: error"
)
# Float32 in another order of sums; what a wrong gradient makes is thousands of times as much.
_TOLERANCE = 1e-4
# What is said by a job that does not start, and what helps.
_CURES = (
    (
        r"allow-run-as-root|run as root|running mpirun as root|executed as root",
        "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or run as another user.",
    ),
    (
        r"not enough slots|slots available",
        "set PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe (Open MPI 5) or "
        "OMPI_MCA_rmaps_base_oversubscribe=1 (4).",
    ),
    (r"No module named 'rannc_backend'", "install rannc-backend for the Python that the ranks start, too."),
    (r"No module named 'mpi4py'|MPI cannot be|load MPI", "install mpi4py for the MPI of this mpirun."),
    (
        r"getaddrinfo|Name or service not known|Temporary failure in name resolution",
        "give this host's name an address in /etc/hosts.",
    ),
    (r"No space left|Bus error|shm", "give the ranks more of /dev/shm (containers: --shm-size=1g)."),
    (r"NCCL", "run again with NCCL_DEBUG=INFO; with CUDA_VISIBLE_DEVICES= the ranks compute on the CPU."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `code`: its exit code; None: it was ended here, at the limit. `answer`: what its ranks
    wrote, if anything.
    """

    code: int | None
    seconds: float
    end_time: float
    output: str
    answer: Mapping[str, Any] | None

    @property
    def tail(self) -> str:
        """The last lines that it printed, before its launcher's own account of the end."""
        lines = [line for line in self.output.strip().splitlines() if line.strip()]
        ends = [number for number, line in enumerate(lines) if _EPILOGUE.search(line)]
        said = lines[: ends[0]] if ends else lines
        return "\n".join((said or lines)[-_TAIL_LINES:])


def printed_answer(output: str) -> Mapping[str, Any] | None:
    """The answer of a rank on a host that does not have the doctor's folder."""
    for line in output.splitlines():
        if ANSWER_MARK in line:
            with suppress(ValueError):
                answer = json.loads(line.split(ANSWER_MARK, 1)[1])
                return answer if isinstance(answer, dict) else None
    return None


def measured_findings(result: JobResult) -> Iterator[Finding]:
    """What the job "measure" shows."""
    answer = result.answer or {}
    connections = answer.get("connections")
    if connections and connections["failed"]:
        yield check_connections(connections)
        return
    if result.code != 0 or not answer:
        yield _failed_finding("two ranks", result)
        return
    if answer.get("num_ranks") == 1:
        cure = "the launcher and the ranks' MPI do not belong together: see MPI above."
        yield Finding(
            name="two ranks", status="problem", text="each of the ranks believes to be alone", cure=cure
        )
        return
    hosts = f", {answer['num_hosts']} hosts" if answer.get("num_hosts", 1) > 1 else ""
    text = f"{answer['num_ranks']} ranks started with {answer['launcher']} on {answer['device']}{hosts} in {result.seconds:.1f} s"
    yield Finding(name="two ranks", status="ok", text=text)
    yield check_connections(connections)
    yield _transfer_finding("message", answer["message"])
    if not answer["sum_is_right"]:
        cure = "report this with the file of `rannc doctor --report FILE`."
        yield Finding(
            name="all-reduce", status="problem", text="the sum of the ranks' numbers is wrong", cure=cure
        )
        return
    yield _transfer_finding("all-reduce", answer["allreduce"])


def training_finding(result: JobResult) -> Finding:
    """What the job "train" shows."""
    if result.code != 0 or result.answer is None:
        return _failed_finding("training step", result)
    return check_training(result.answer)


def _failed_finding(name: str, result: JobResult) -> Finding:
    text = "did not end in time" if result.code is None else f"ended with exit code {result.code}"
    tail = f":\n{result.tail}" if result.tail else ""
    return Finding(
        name=name, status="problem", text=f"a job of ranks {text}{tail}", cure=cure_of(result.output)
    )


def abort_finding(result: JobResult) -> Finding:
    """What the job "abort" shows."""
    if result.answer is None:
        return Finding(
            name="abort",
            status="problem",
            text=f"the test did not run:\n{result.tail}",
            cure=cure_of(result.output),
        )
    seconds = result.end_time - float(result.answer["time"])
    if result.code is None or seconds > _MAX_ABORT_SECONDS:
        text = f"a job went on for {seconds:.0f} s after one of its ranks had died"
        cure = "let the scheduler limit the time of jobs, and report this with the file of `rannc doctor --report FILE`."
        return Finding(name="abort", status="problem", text=text, cure=cure)
    if result.code == 0:
        text = f"a job whose rank died ended after {seconds:.1f} s as if all were well (exit code 0)"
        return Finding(
            name="abort",
            status="problem",
            text=text,
            cure="use another launcher: schedulers would not see failures.",
        )
    text = f"a job ended {seconds:.1f} s after one of its ranks had died, with exit code {result.code}"
    return Finding(name="abort", status="ok", text=text)


def cure_of(output: str) -> str:
    """What helps against what a job has said."""
    for pattern, cure in _CURES:
        if re.search(pattern, output, re.IGNORECASE):
            return cure
    return "start two ranks by hand (mpirun -np 2 python -m rannc_backend.doctor.job measure answer.json) and read what they say."


def _transfer_finding(name: str, seconds: Mapping[str, float]) -> Finding:
    rate = seconds["large_bytes"] / max(seconds["large"], 1e-9)
    text = f"latency {seconds['small'] * 1e6:.0f} us, {rate / _BYTES_PER_GB:.2f} GB/s for {seconds['large_bytes'] / 2**20:.0f} MB"
    if rate < _SLOW_BYTES_PER_SECOND:
        cure = "see whether other programs use the cores, and which network interface is taken (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
        return Finding(name=name, status="warning", text=f"slow: {text}", cure=cure)
    return Finding(name=name, status="ok", text=text)


def check_connections(answer: Mapping[str, Any] | None) -> Finding:
    """What the attempts show."""
    if answer is None:
        return Finding(
            name="connections",
            status="ok",
            text="not tried: the launcher has no way to tell addresses beside them",
        )
    failed = answer["failed"]
    if not failed:
        where = "; ".join(dict.fromkeys(answer["addresses"]))
        return Finding(
            name="connections", status="ok", text=f"{answer['num_ranks']} ranks reach each other at {where}"
        )
    texts = [
        f"rank {each['rank']} on {each['host']} ({each['from']}) cannot reach rank {each['peer']} on "
        f"{each['peer_host']} at {each['at']}: {each['why']}"
        for each in failed[:_MAX_NAMED]
    ]
    rest = len(failed) - _MAX_NAMED
    cure = (
        "let the ranks' hosts connect to each other at all TCP ports above 1023 (firewall, security group), "
        "or name an interface on which they can: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    )
    text = "; ".join(texts) + (f"; and {rest} more" if rest > 0 else "")
    return Finding(name="connections", status="problem", text=text, cure=cure)


def check_training(answer: Mapping[str, Any]) -> Finding:
    """Whether the steps were those of one process."""
    losses = " ".join(f"{loss:.4f}" for loss in answer["losses"])
    text = (
        f"{len(answer['losses'])} steps of a small model over 2 stages on {answer['device']}: loss {losses}, "
        f"as in one process (largest difference {answer['difference']:.1e}); first step "
        f"{answer['first_seconds']:.1f} s, then {answer['step_seconds'] * 1e3:.0f} ms each"
    )
    # NaN is not within any tolerance.
    if not answer["difference"] <= _TOLERANCE:
        plain = " ".join(f"{loss:.4f}" for loss in answer["plain_losses"])
        text = f"the loss is {losses}, and {plain} in one process; the largest difference is {answer['difference']:.3g}"
        return Finding(
            name="training step",
            status="problem",
            text=text,
            cure="report this with the file of `rannc doctor --report FILE`.",
        )
    return Finding(name="training step", status="ok", text=text)
