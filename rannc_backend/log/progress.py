"""How far profiling and search are, and whether the user wants them to end: bars, plain lines, or silence.

In: numbered tasks from the code that works. Out: bars with the time left on a terminal, else at most one line
per `LINE_SECONDS`; and `cancelled()`, true from the first Ctrl-C on. A second Ctrl-C interrupts as always.

Terms. Task: a counted piece of work, opened as a context. Use:

    with planning_progress(rank) as progress:
        with progress.task("search", total=100) as task:
            while work and not progress.cancelled():
                task.advance(1)
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from rannc_backend.settings import hooks

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
_DUMB_TERMINALS = ("dumb", "unknown")  # as rich calls them, which draws no bars there


@dataclass(slots=True)
class Cancellation:
    """Set once, by Ctrl-C or by a test; read by the work."""

    requested: bool = False


@dataclass(slots=True)
class Task:
    """A counted piece of work; a context that returns itself. `advance` may be called as often as one
    likes. `number`: of its bar.
    """

    name: str
    total: int | None
    progress: Progress
    number: TaskID | None = None
    done: int = 0
    started: float = 0.0

    def advance(self, count: int = 1) -> None:
        self.done += count
        self.progress.report(self)

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.end(self)


@dataclass
class Progress:
    """Where work reports how far it is, and asks whether it shall go on. This one says nothing."""

    cancellation: Cancellation = field(default_factory=Cancellation)

    def task(self, name: str, total: int | None) -> Task:
        """Open a task of `total` steps; None where their number is not known."""
        return Task(name, total, self)

    def cancelled(self) -> bool:
        """Whether the user wants the best found so far, now."""
        return self.cancellation.requested

    def report(self, task: Task) -> None:
        """Show how far a task is."""

    def end(self, task: Task) -> None:
        """Show a task no longer."""


@dataclass
class LineProgress(Progress):
    """A line now and then, never two within `LINE_SECONDS`. `clock` in seconds."""

    write: Callable[[str], None] = logger.info
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None

    def task(self, name: str, total: int | None) -> Task:
        now = self.clock()
        self._last = now if self._last is None else self._last
        return Task(name, total, self, started=now)

    def report(self, task: Task) -> None:
        now = self.clock()
        if self._last is not None and now - self._last < LINE_SECONDS:
            return
        self._last = now
        if task.total is None:
            self.write(f"{task.name}: {task.done} done")
            return
        left = max(task.total - task.done, 0) * (now - task.started) / max(task.done, 1)
        self.write(f"{task.name}: {task.done} of {task.total}, about {duration_text(left)} left")


@dataclass(kw_only=True)
class BarProgress(Progress):
    """Bars of rich; they vanish when their task ends."""

    bars: RichBars

    def task(self, name: str, total: int | None) -> Task:
        return Task(name, total, self, self.bars.add_task(name, total=total))

    def report(self, task: Task) -> None:
        assert task.number is not None, "a task without its bar"
        self.bars.update(task.number, completed=task.done)

    def end(self, task: Task) -> None:
        assert task.number is not None, "a task without its bar"
        self.bars.remove_task(task.number)


@contextmanager
def planning_progress(
    rank: int = 0, stream: TextIO | None = None, *, catches_interrupt: bool = True
) -> Iterator[Progress]:
    """What this process shall show while it plans, and Ctrl-C caught meanwhile (`catches_interrupt`).

    Bars where `stream` (stderr) is a terminal that can draw them, log lines where not, nothing on ranks but
    0. Outside of the main thread, where Python delivers no signals, Ctrl-C is left alone.
    """
    cancellation = Cancellation()
    with catch_interrupt(cancellation) if catches_interrupt else nullcontext():
        if rank != 0:
            yield Progress(cancellation)
            return
        stream = sys.stderr if stream is None else stream
        if not stream.isatty() or os.environ.get("TERM", "").lower() in _DUMB_TERMINALS:
            yield LineProgress(cancellation)
            return
        with _rich_bars(stream) as bars:
            yield BarProgress(cancellation, bars=bars)


@contextmanager
def catch_interrupt(
    cancellation: Cancellation, log: Callable[[str], None] = logger.warning
) -> Iterator[None]:
    """Let the first Ctrl-C set `cancellation` and the second one interrupt; the handler that was there is put
    back.

    Does nothing outside of the main thread, or where SIGINT is ignored or handled by something else than
    Python.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if cancellation.requested:
            before(number, frame)
            return
        cancellation.requested = True
        log("Ctrl-C: taking the best plan so far; once more to interrupt")

    undo = hooks.handle_signal("Ctrl-C of the search", signal.SIGINT, handle)
    try:
        yield
    finally:
        undo()


def duration_text(seconds: float) -> str:
    """ "42 s", "3 min 20 s", "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _rich_bars(stream: TextIO) -> RichBars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return RichProgress(*columns, console=Console(file=stream), transient=True)
