"""What a rank says of the error that ends it: the cause, the place and the cure first, and once for the ranks
of a host that have the same.

In: an exception that nobody catches. Out: its parts, its traceback as text, and a hook for the time before
the job stands, when no rank can hear of another. A *word* is what a rank says of itself; ranks of a host see in the
names of each other's processes who has the word.

An error of this package has its place in the user's source: of its traceback only the user's lines are shown,
all of it at the log level debug. Of any other exception the whole traceback is shown, by whatever hook was
there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rannc_backend.errors import InternalError, RanncError
from rannc_backend.log.logger import ROOT_LOGGER
from rannc_backend.runtime.job.start_watch import find_variables, launcher_of, missing_ranks, ranks_below
from rannc_backend.runtime.processes import name_of, set_name
from rannc_backend.settings import hooks
from rannc_backend.settings.user_files import UserFile, write_text

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

INTERRUPTED = "interrupted (Ctrl-C)"
_OUT_OF_MEMORY_CURE = (
    "more micro-batches (RANNC_PIPELINE_NUM), more stages (RANNC_PARTITION_NUM), or a memory limit "
    "below the device's memory (RANNC_MEM_LIMIT_GB)."
)
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OWN = str(Path(__file__).resolve().parents[2])
_LIBRARIES = (_OWN, "site-packages", "dist-packages", "<", sysconfig.get_path("stdlib"))
# Names of processes: 15 bytes at most.
_WANTS, _HAS_SAID, _IS_SILENT = "rw", "rs", "rq"
_DECIDED = re.compile(rf"({_HAS_SAID}|{_IS_SILENT})[0-9a-f]{{12}}")
_WORD_SECONDS = 0.1
_STAY_SECONDS = 10.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of an error: what is wrong, where (as "train.py:12, in main"), what to change; "" where that is
    unknown.
    """

    cause: str
    place: str
    cure: str


def parts_of(error: BaseException) -> Parts:
    """Cause, place and cure of an exception with its traceback."""
    name, frame = type(error).__name__, user_frame(error.__traceback__)
    if isinstance(error, RanncError):
        return Parts(cause=f"{name}: {error.problem}", place=error.place or frame, cure=error.cure)
    is_memory = isinstance(error, MemoryError) or "OutOfMemory" in name
    return Parts(cause=f"{name}: {error}", place=frame, cure=_OUT_OF_MEMORY_CURE if is_memory else "")


def block(title: str, rows: list[tuple[str, str]]) -> str:
    """Lines that say all of it; a row's further lines stand under its first."""
    width = max(len(name) for name, _ in rows)
    lines = [f"[rannc] {title}"]
    for name, text in rows:
        head, *more = text.splitlines() or [""]
        lines.append(f"[rannc]   {name:<{width}}  {head}")
        lines += [f"[rannc]   {'':<{width}}  {line}" for line in more]
    return "\n".join(lines) + "\n"


def user_frame(trace: TracebackType | None) -> str:
    """Innermost frame outside of libraries and of this package, as "train.py:12, in main"; "" if there is
    none.
    """
    frames = _user_frames(trace)
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def trace_text(before: Hook, error: BaseException) -> str:
    """What is shown of a traceback. `before`: the hook that would have shown it."""
    is_short = isinstance(error, RanncError) and not isinstance(error, InternalError)
    if not is_short or logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG):
        return _said_by(before, error)
    frames = traceback.format_list(_user_frames(error.__traceback__))
    return (
        "".join(["your lines on the way there (RANNC_LOG_LEVEL=debug shows all):\n", *frames])
        if frames
        else ""
    )


def write_torchrun_error(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write the cause where torchrun looks for it, so that its own account of the end has it. Nothing
    elsewhere.
    """
    path = environ.get(_ERROR_FILE)
    if not path:
        return
    parts = parts_of(error)
    text = "\n".join(
        part
        for part in (
            parts.cause,
            parts.place and f"  at {parts.place}",
            parts.cure and f"  cure: {parts.cure}",
        )
        if part
    )
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(RanncError):
        write_text(
            UserFile(path=path, what="error file", named_by=_ERROR_FILE), json.dumps({"message": message})
        )


def _user_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(trace)
        if not any(mark in frame.filename for mark in _LIBRARIES)
    ]


def _said_by(hook: Hook, error: BaseException) -> str:
    """What a hook writes to sys.stderr."""
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        hook(type(error), error, error.__traceback__)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


class EarlyWords:
    """The hook from the lookup of the backend until the job stands.

    Args:
        has_started: whether it stands; then other hooks speak.
        on_word: before this rank speaks, or lets another one speak.
    """

    def __init__(self, has_started: Callable[[], bool], on_word: Callable[[], None]) -> None:
        self._has_started, self._on_word = has_started, on_word
        self._before: Hook = sys.excepthook
        self._is_installed = False

    def install(self, environ: Mapping[str, str]) -> None:
        """Put the hook in place, in a job of several ranks; once per process."""
        if self._is_installed or find_variables(environ) is None:
            return
        self._is_installed = True
        self._before = sys.excepthook
        hooks.replace("early words", sys, "excepthook", self._hook)

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._has_started():
            self._before(kind, error, trace)
            return
        error = error.with_traceback(trace)
        self._on_word()
        if isinstance(error, KeyboardInterrupt):
            self._say_interrupted(error)
            return
        write_torchrun_error(error, os.environ)
        parts = parts_of(error)
        word = Word(f"{parts.cause}\n{parts.place}", os.environ)
        if not word.is_ours:
            return
        sys.stderr.write(early_text(parts, trace_text(self._before, error), os.environ))
        sys.stderr.flush()
        word.stay()

    def _say_interrupted(self, error: KeyboardInterrupt) -> None:
        """Where each rank was tells nothing: it was told to end."""
        if logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG):
            self._before(KeyboardInterrupt, error, error.__traceback__)
        elif Word(INTERRUPTED, os.environ).is_ours:
            place = user_frame(error.__traceback__)
            sys.stderr.write(early_text(Parts(cause=INTERRUPTED, place=place, cure=""), "", os.environ))
            sys.stderr.flush()


def early_text(parts: Parts, trace: str, environ: Mapping[str, str]) -> str:
    """What a rank says that fails before the job stands."""
    found = find_variables(environ)
    rank = "" if found is None else f"rank {environ[found[0]]} of {found[2] or found[1]} "
    rows = [("cause", parts.cause), ("at", parts.place), ("cure", parts.cure)]
    title = f"{rank}has failed before the job stood (host {socket.gethostname()}, pid {os.getpid()})"
    return block(title, [row for row in rows if row[1]]) + trace


class Word:
    """Whether this rank is the first of its host to say something: it, or the lowest of those that want to at
    the same time.
    """

    def __init__(self, text: str, environ: Mapping[str, str]) -> None:
        self._digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        found = find_variables(environ)
        self._rank_name = "" if found is None else found[0]
        self._launcher = launcher_of(os.getpid(), self._rank_name) if found is not None else 0
        self._own_rank = int(environ[self._rank_name]) if found is not None else 0
        self.is_ours = not self._launcher or self._is_first()

    def _is_first(self) -> bool:
        set_name(_WANTS + self._digest)
        time.sleep(_WORD_SECONDS)
        names = self._names()
        lower = [
            rank for rank, name in names.items() if name == _WANTS + self._digest and rank < self._own_rank
        ]
        if lower or _HAS_SAID + self._digest in names.values():
            set_name(_IS_SILENT + self._digest)
            return False
        set_name(_HAS_SAID + self._digest)
        return True

    def stay(self) -> None:
        """Be there for those that may still come to the same: who is on the way to the start, and has not
        said that it fails.
        """
        until = time.monotonic() + _STAY_SECONDS
        while self._launcher and time.monotonic() < until:
            coming = missing_ranks(self._launcher, self._rank_name).keys() - {self._own_rank}
            names = self._names()
            if all(_DECIDED.fullmatch(names.get(rank, _IS_SILENT + self._digest)) for rank in coming):
                return
            time.sleep(_LOOK_SECONDS)

    def _names(self) -> dict[int, str]:
        """Of the processes of the ranks on this host."""
        return {rank: name_of(pid) for rank, pid in ranks_below(self._launcher, self._rank_name).items()}
