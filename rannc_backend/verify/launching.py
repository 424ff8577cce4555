"""Starts the two jobs of a verification, watches them, and says what came out.

In: settings, the command that starts ranks, an environment. Out: a `Verified`, or a `VerificationError` with
cause, place and cure. The directory with what was recorded is readable for this user alone and removed in the
end; no process is left behind.

Terms: an *attempt* is a run of the ranks under some settings; a second one follows where the first shows that
others are needed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rannc_backend.errors import VerificationError, user_location
from rannc_backend.verify.settings import (
    FAILURE,
    Failed,
    Failure,
    Mode,
    Needs,
    OtherSettingsNeeded,
    Result,
    VerifySettings,
    failure_file,
    plan_file,
    progress_file,
    result_file,
    settings_file,
    stacks_file,
    write_whole,
)

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0  # after the limit, for what ranks write about themselves
_TAIL_LINES = 12
_ENDING_SECONDS = 5.0  # of a job of which a rank has failed
_MAX_OUTPUT_BYTES = 2**20
_KILLED = 128 + signal.SIGKILL
_STACK_LINE = re.compile(r'^  (File "[^"]+", line \d+ in .+)$', re.MULTILINE)
_NEEDS_EVALUATION: Mapping[Needs, str] = {
    "random numbers": "the model draws random numbers outside of its Dropout modules, and plain torch draws "
    "others",
    "batch statistics": "batch normalisation in training mode uses the statistics of a micro-batch on one "
    "replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What came out. ``settings``: those of the attempt that was compared; ``plan``: in words; ``reasons``:
    for further attempts.
    """

    settings: VerifySettings
    result: Result
    plan: str
    reasons: tuple[str, ...]
    seconds: Mapping[Mode, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told how it goes on: a job begins; a step of it is done; another attempt follows, for a
    reason.
    """

    begins: Callable[[Mode], None]
    step: Callable[[Mode, int], None]
    again: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """``code`` None: it was ended at the limit."""

    code: int | None
    seconds: float
    output: str


def verify(
    settings: VerifySettings,
    command: Sequence[str],
    environ: Mapping[str, str],
    listener: Listener,
    *,
    may_use_own_dtype: bool,
) -> Verified:
    """Run the ranks, then the reference.

    Args:
        command: starts ranks of `job.py`; its arguments follow.
        may_use_own_dtype: where the script fails in float64, it is tried as it is.

    Raises:
        VerificationError: there is nothing to compare.
    """
    reasons: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rannc_verify_") as folder:
        while True:
            directory = Path(folder, f"attempt-{len(reasons)}")
            directory.mkdir(mode=0o700)
            try:
                seconds = _run(settings, directory, command, environ, listener)
                break
            except _OtherSettings as other:
                reason, settings = other.reason, other.settings
            except VerificationError as error:
                if (
                    not may_use_own_dtype
                    or settings.dtype == "own"
                    or not isinstance(error.__cause__, _FailedInCall)
                ):
                    raise
                reason = f"in float64 {_first_line(error.problem)}; its own dtypes are compared"
                settings = settings.model_copy(update={"dtype": "own"})
            reasons.append(reason)
            listener.again(reason)
        plan = plan_file(directory).read_text(encoding="utf-8") if plan_file(directory).exists() else ""
        result = Result.model_validate_json(result_file(directory).read_text(encoding="utf-8"))
    return Verified(settings=settings, result=result, plan=plan, reasons=tuple(reasons), seconds=seconds)


class _OtherSettings(Exception):  # noqa: N818
    def __init__(self, reason: str, settings: VerifySettings) -> None:
        self.reason, self.settings = reason, settings
        super().__init__(reason)


class _FailedInCall(Exception):  # noqa: N818
    """The script raised something once a model had been called, which may be because of its dtype."""


def _run(
    settings: VerifySettings,
    directory: Path,
    command: Sequence[str],
    environ: Mapping[str, str],
    listener: Listener,
) -> dict[Mode, float]:
    write_whole(settings_file(directory), settings.model_dump_json())
    seconds: dict[Mode, float] = {}
    for mode in ("ranks", "reference"):
        listener.begins(mode)
        watch = _Watch(directory, mode, settings.num_ranks, listener)
        ended = _run_job([*command, str(directory), mode], environ, settings.limit_seconds, watch)
        seconds[mode] = ended.seconds
        _check_end(settings, directory, mode, ended)
    return seconds


@dataclass(frozen=True, slots=True)
class _Watch:
    """Looks at what a job leaves in its directory while it runs."""

    directory: Path
    mode: Mode
    num_ranks: int
    listener: Listener

    def report_steps(self) -> None:
        file = progress_file(self.directory, self.mode)
        self.listener.step(
            self.mode, len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
        )

    def has_failed(self) -> bool:
        return any(failure_file(self.directory, self.mode, rank).exists() for rank in range(self.num_ranks))


def _check_end(settings: VerifySettings, directory: Path, mode: Mode, ended: _Ended) -> None:
    what = os.path.basename(settings.script)
    run = "on its ranks" if mode == "ranks" else "in one process"
    failures = _failures(directory, mode, settings.num_ranks)
    if ended.code is None and not failures:
        raise _out_of_time(settings, directory, mode, f"{what} {run} has not come to its end", ended)
    if ended.code == 0 and not failures:
        _check_recorded(settings, directory, mode, what)
        return
    _raise_if_others_needed(settings, failures)
    failed = {rank: failure for rank, failure in failures.items() if isinstance(failure, Failed)}
    own = {rank: failure for rank, failure in failed.items() if not failure.by_other} or failed
    if not own:
        raise _ended_by_itself(f"{what} {run}", mode, ended)
    rank, failure = next(iter(own.items()))
    cure = failure.cure or (
        f"start it by hand: `mpirun -np {settings.num_ranks} python {what}` should do its first steps."
        if mode == "ranks"
        else "the second run gives the script rank 0's rows of every output: what it does with them must fit."
    )
    text = f"{what} {run} failed on rank {rank}: {failure.what}"
    has_called = (directory / "rank-0").is_dir()
    raise VerificationError(text, cure=cure, place=failure.place) from (
        _FailedInCall() if has_called else None
    )


def _failures(directory: Path, mode: Mode, num_ranks: int) -> dict[int, Failure]:
    """Of the ranks that left one, the first to fail first."""
    files = [(rank, failure_file(directory, mode, rank)) for rank in range(num_ranks)]
    there = sorted((file.stat().st_mtime_ns, rank, file) for rank, file in files if file.exists())
    return {rank: FAILURE.validate_json(file.read_text(encoding="utf-8")) for _, rank, file in there}


def _raise_if_others_needed(settings: VerifySettings, failures: Mapping[int, Failure]) -> None:
    needs = next((each.needs for each in failures.values() if isinstance(each, OtherSettingsNeeded)), None)
    if needs is None:
        return
    reason = _NEEDS_EVALUATION[needs]
    if settings.evaluation:
        raise VerificationError(
            f"{reason}, in evaluation mode, too", cure="switch that off in the script, to compare the rest."
        )
    raise _OtherSettings(
        f"{reason}: evaluation mode is compared", settings.model_copy(update={"evaluation": True})
    )


def _check_recorded(settings: VerifySettings, directory: Path, mode: Mode, what: str) -> None:
    ranks = [rank for rank in range(settings.num_ranks) if (directory / f"rank-{rank}").is_dir()]
    if not ranks:
        raise VerificationError(
            f"{what} ended without a call of a model that is compiled with backend='rannc'",
            cure='compile the model, torch.compile(model, backend="rannc"), and give the arguments with '
            "which the script trains.",
        )
    if len(ranks) < settings.num_ranks:
        raise VerificationError(
            f"{settings.num_ranks} ranks were started, and {len(ranks)} have called the model",
            cure="see with `rannc doctor` whether launcher and mpi4py are of one MPI; all ranks must call "
            "the model.",
        )
    if mode == "reference" and not result_file(directory).exists():
        raise VerificationError(
            f"{what} in one process ended before it was compared", cure="let it not end by os._exit."
        )


def _out_of_time(
    settings: VerifySettings, directory: Path, mode: Mode, problem: str, ended: _Ended
) -> VerificationError:
    places = {}
    for rank in range(settings.num_ranks):
        file = stacks_file(directory, mode, rank)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        places[rank] = _innermost(text)
    known = {rank: place for rank, place in places.items() if place}
    place = "; ".join(f"rank {rank}: {place}" for rank, place in known.items())
    cure = "give a larger --timeout-seconds, or fewer --steps or --layers, if it is only slow."
    return VerificationError(
        f"{problem} after {ended.seconds:.0f} s", cure=cure, place=place, output=_tail(ended.output)
    )


def _innermost(stacks: str) -> str:
    """The user's innermost line in what faulthandler wrote of a process: the main thread comes last,
    innermost line first.
    """
    _, _, main = stacks.rpartition("(most recent call first):\n")
    lines = [line.replace(" in ", ", in ", 1) for line in reversed(_STACK_LINE.findall(main))]
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return user_location("\n".join(line for line in lines if own not in line and "runpy" not in line))


def _ended_by_itself(what: str, mode: Mode, ended: _Ended) -> VerificationError:
    if ended.code in (-signal.SIGKILL, _KILLED):
        cure = "the system may have had no memory left: give --layers, or fewer rows per rank."
    elif mode == "ranks":
        cure = "see the lines above, and `rannc doctor`: can ranks be started here?"
    else:
        cure = "see the lines above."
    return VerificationError(
        f"{what} ended with exit code {ended.code} and said no reason", cure=cure, output=_tail(ended.output)
    )


def _run_job(
    command: Sequence[str], environ: Mapping[str, str], limit_seconds: float, watch: _Watch
) -> _Ended:
    """Run a job, at most so long, and not much longer than one of its ranks; whatever happens, none of its
    processes is left.
    """
    begin = time.monotonic()
    until, failed_at = begin + limit_seconds + _GRACE_SECONDS, begin
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < until:
                watch.report_steps()
                if not watch.has_failed():
                    failed_at = time.monotonic()
                else:  # others may wait for that rank for long
                    until = min(until, failed_at + _ENDING_SECONDS)
                time.sleep(_POLL_SECONDS)
            code = process.poll()
        finally:
            _end_group(process)
        watch.report_steps()
        output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
        text = output.read().decode("utf-8", errors="replace")
    return _Ended(code=code, seconds=time.monotonic() - begin, output=text)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    # A launcher that is told to end takes its ranks along, which may be in groups of their own.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
