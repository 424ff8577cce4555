"""Parent side: start worker groups under mpirun, watch them, and turn their lines into outcomes.

In: cases. Out: an `Outcome` per case name. Terms: a *group* is one mpirun; when a group dies or hangs in a
case, that case fails with the end of the output, and the cases after it run in a new group.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.harness.case import Case, Outcome
from tests.distributed.harness.template import Templates

WORKER = Path(__file__).with_name("worker.py")
# The first group also waits for the templates, which import for as long as a busy machine takes.
START_LIMIT_SECONDS = 180.0
# Ranks finish a case at about the same time; after one wrote its failure the others get this long.
GRACE_SECONDS = 10.0
_TAIL_CHARACTERS = 6000
# Starting ranks takes seconds: when nothing works at all, hundreds of cases must not be tried one by one.
MAX_DEATHS_IN_A_ROW = 8


def launcher(world: int) -> list[str]:
    """The command before `python`: mpirun beside this interpreter, else the one on PATH; none for one
    rank.
    """
    if world == 1:
        return []
    beside = Path(sys.executable).with_name("mpirun")
    command = str(beside) if beside.exists() else shutil.which("mpirun")
    assert command, "there is no mpirun: install the extra that brings one"
    return [command, "-n", str(world)]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of the ranks: one thread each, root and more ranks than cores allowed under Open MPI
    too.
    """
    return (
        dict(os.environ)
        | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PYTHONUNBUFFERED": "1",
        }
        | dict(extra)
    )


class Process:
    """A launched job with its output in a file; always ended, also when the test is."""

    def __init__(self, command: Sequence[str], output: Path, extra: Mapping[str, str]) -> None:
        self.output = output
        self._file = open(output, "w")  # noqa: SIM115 - closed in end()
        self.handle = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment(extra),
            start_new_session=True,
        )

    def tail(self) -> str:
        """The end of what the job printed."""
        return self.output.read_text(errors="replace")[-_TAIL_CHARACTERS:]

    def wait(self, limit_seconds: float) -> int | None:
        """The exit code, or None when the job still runs after that time."""
        try:
            return self.handle.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the job if it still runs: politely (mpirun then ends its ranks), then at once."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self.handle.poll() is None:
                os.killpg(self.handle.pid, signal_number)
                self.wait(3.0)
        self._file.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def run_script(
    script: Path,
    arguments: Sequence[str],
    *,
    world: int,
    directory: Path,
    limit_seconds: float,
    command: Sequence[str] = (),
) -> tuple[int | None, str, float]:
    """Run a Python script as a job of its own: (exit code or None if it had to be ended, output, seconds).

    Args:
        command: another launcher in front of the script, in place of mpirun and python.
    """
    chosen = [*(command or [*launcher(world), sys.executable]), str(script), *arguments]
    begin = time.monotonic()
    with Process(chosen, directory / f"{script.stem}.{begin:.3f}.log", {}) as process:
        code = process.wait(limit_seconds)
        seconds = time.monotonic() - begin
    return code, process.output.read_text(errors="replace"), seconds


def run_cases(
    cases: Iterable[Case],
    directory: Path,
    templates: Templates,
    stop: threading.Event | None = None,
    *,
    stop_at_failure: bool = False,
) -> dict[str, Outcome]:
    """Run all cases, one group of ranks for those that can share one; once `stop` is set, what runs is ended
    and the rest left out.

    Args:
        templates: of the processes that ranks are forked from.
        stop_at_failure: the first case that fails is the last one; those after it fail with its words.
    """
    stop = stop or threading.Event()
    ordered = sorted(cases, key=lambda case: case.group)
    outcomes: dict[str, Outcome] = {}
    for (world, extra), members in itertools.groupby(ordered, key=lambda case: case.group):
        waiting, num_deaths = list(members), 0
        while waiting:
            if stop.is_set():
                break
            if num_deaths >= MAX_DEATHS_IN_A_ROW:
                text = f"not run: {num_deaths} groups of ranks died one after the other"
                outcomes |= {
                    case.name: Outcome(failures=(f"{case.name}: {text}",), results=()) for case in waiting
                }
                break
            group_directory = directory / f"world{world}_{len(outcomes)}"
            group_directory.mkdir(parents=True)
            done = _run_group(waiting, world, dict(extra), group_directory, templates, stop)
            assert done, "a group of ranks ended without a result for any case"
            outcomes |= done
            waiting = [case for case in waiting if case.name not in done]
            failed = next((name for name, outcome in done.items() if outcome.failures), None)
            if stop_at_failure and failed is not None:
                words = (f"not run, as {failed} has failed:", *done[failed].failures)
                outcomes |= {case.name: Outcome(failures=words, results=()) for case in waiting}
                break
            num_deaths = num_deaths + 1 if len(done) == 1 else 0
    return outcomes


def _run_group(
    cases: list[Case],
    world: int,
    extra: dict[str, str],
    directory: Path,
    templates: Templates,
    stop: threading.Event,
) -> dict[str, Outcome]:
    path = directory / "cases.jsonl"
    path.write_text("\n".join(case.to_json() for case in cases))
    command = [*launcher(world), *templates.command([str(WORKER), str(path), str(directory)])]
    with Process(command, directory / "output.log", extra) as process:
        reason = _watch(process, cases, world, directory, stop)
    return _outcomes(cases, directory, world, reason or "the ranks ended early", process.tail())


def _outcomes(cases: list[Case], directory: Path, world: int, reason: str, tail: str) -> dict[str, Outcome]:
    """Outcomes up to the case in which the group ended; that one is blamed, later ones are left for a new
    group.
    """
    events = [_lines(directory, rank) for rank in range(world)]
    started = {line["case"] for lines in events for line in lines if line["event"] == "start"}
    ends = [{line["case"]: line for line in lines if line["event"] == "end"} for lines in events]
    outcomes = {}
    for case in cases:
        lines = [rank_ends.get(case.name) for rank_ends in ends]
        if all(line is not None for line in lines):
            outcomes[case.name] = _outcome([line for line in lines if line is not None])
        elif case.name in started or not outcomes:
            outcomes[case.name] = _interrupted(case, lines, reason, tail)
        if case.name not in outcomes or any(line is None or line["fatal"] for line in lines):
            break
    return outcomes


def _watch(process: Process, cases: list[Case], world: int, directory: Path, stop: threading.Event) -> str:
    """Wait for the group: "" when it ended well, else why it was ended or how it ended."""
    limits = {case.name: case.limit_here for case in cases}
    seen, since, allowed = -1, time.monotonic(), START_LIMIT_SECONDS
    while (code := process.wait(0.1)) is None:
        if stop.is_set():
            return "the tests were ended"
        events = [line for rank in range(world) for line in _lines(directory, rank)]
        if len(events) != seen:
            seen, since = len(events), time.monotonic()
            # The rank itself prints where it hangs when its limit is over, so it gets a little longer here.
            allowed = max([limits[line["case"]] for line in events], default=START_LIMIT_SECONDS) + 5.0
        failed = any(line["event"] == "end" and line["fatal"] for line in events)
        if time.monotonic() - since > (GRACE_SECONDS if failed else allowed):
            return f"no rank got on for {time.monotonic() - since:.0f} s"
    return "" if code == 0 else f"the ranks ended with exit code {code}"


def _lines(directory: Path, rank: int) -> list[dict[str, Any]]:
    path = directory / f"rank{rank}.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    # The last piece is empty, or a line that is being written.
    return [json.loads(line) for line in lines[:-1]]


def _outcome(lines: list[dict[str, Any]]) -> Outcome:
    failures = tuple(f"rank {rank}: {text}" for rank, line in enumerate(lines) for text in line["failures"])
    results = tuple({**line["result"], "worst": line["worst"], "seconds": line["seconds"]} for line in lines)
    return Outcome(failures=failures, results=results)


def _interrupted(case: Case, lines: list[dict[str, Any] | None], reason: str, tail: str) -> Outcome:
    texts = [f"{case.name}: {reason}"]
    for rank, line in enumerate(lines):
        state = "did not finish" if line is None else "finished"
        texts.append(f"rank {rank} {state}")
        texts += [] if line is None else [f"rank {rank}: {text}" for text in line["failures"]]
    return Outcome(failures=(*texts, f"end of the output:\n{tail}"), results=())
