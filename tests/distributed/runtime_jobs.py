"""Runs the small workers of the runtime's own tests, each in a job of its own.

In: launcher, number of ranks, worker and arguments. Out: a `Job`.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.harness.launch import launcher as mpirun
from tests.distributed.harness.launch import run_script
from tests.distributed.harness.template import Templates

WORKERS = Path(__file__).with_name("workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How a job ended.

    Attributes:
        code: exit code; None if it had to be ended by us.
        seconds_after_fault: from the moment that the worker printed to the end of the job; None without such
        a moment.
    """

    code: int | None
    output: str
    seconds_after_fault: float | None

    @property
    def block(self) -> str:
        """What the monitor said."""
        return "\n".join(line for line in self.output.splitlines() if line.startswith("[rannc]"))


def run_job(
    directory: Path,
    world: int,
    worker: str,
    *arguments: str,
    launcher: str = "mpirun",
    limit_seconds: float = 60,
    templates: Templates | None = None,
) -> Job:
    """Run tests/distributed/workers/<worker>.py on `world` ranks; with `templates` under mpirun, forked where
    torch is imported already.
    """
    command: list[str] = [] if templates is None else [*mpirun(world), *templates.command([])]
    if launcher == "torchrun":
        command = [str(Path(sys.executable).with_name("torchrun")), f"--nproc-per-node={world}"]
    script = WORKERS / f"{worker}.py"
    code, output, _ = run_script(
        script, arguments, world=world, directory=directory, limit_seconds=limit_seconds, command=command
    )
    end = time.time()
    mark = re.search(r"FAULT_AT (\S+)", output)
    return Job(code=code, output=output, seconds_after_fault=end - float(mark[1]) if mark else None)


def assert_ok(job: Job, world: int) -> None:
    """The job ended well on every rank, and nobody had anything to say."""
    assert job.code == 0, job.output[-3000:]
    # Unbuffered lines of several ranks can meet on one line.
    assert sorted(re.findall(r"\bok (\d+)", job.output.replace("ok", " ok"))) == [
        str(rank) for rank in range(world)
    ], job.output
    assert "[rannc]" not in job.output and "Traceback" not in job.output, job.output[-3000:]
