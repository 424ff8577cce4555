"""How far profiling and search are, and whether the user wants them to end: bars, plain lines, or silence.

In: numbered tasks from the code that works. Out: bars with the time left on a terminal, else at most one line per
`LINE_SECONDS`; and `cancelled()`, true from the first Ctrl-C on. A second Ctrl-C interrupts as always.

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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
_DUMB_TERMINALS = ("dumb", "unknown")  # as rich calls them, which draws no bars there


class Task(Protocol):
    """A counted piece of work; a context that returns itself. `advance` may be called as often as one likes."""

    def advance(self, count: int = 1) -> None: ...
    def __enter__(self) -> Task: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


class Progress(Protocol):
    """Where work reports how far it is, and asks whether it shall go on."""

    def task(self, name: str, total: int | None) -> Task:
        """Open a task of `total` steps; None where their number is not known."""
        ...

    def cancelled(self) -> bool:
        """Whether the user wants the best found so far, now."""
        ...


@dataclass(slots=True)
class Cancellation:
    """Set once, by Ctrl-C or by a test; read by the work."""

    requested: bool = False


@dataclass(slots=True)
class _PlainTask:
    """Counts steps and hands them to `tell(task)`; a context that returns itself."""

    name: str
    total: int | None
    started: float
    tell: Callable[[_PlainTask], None]
    done: int = 0

    def advance(self, count: int = 1) -> None:
        self.done += count
        self.tell(self)

    def __enter__(self) -> _PlainTask:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(slots=True)
class SilentProgress:
    """Says nothing."""

    cancellation: Cancellation = field(default_factory=Cancellation)

    def task(self, name: str, total: int | None) -> Task:
        return _PlainTask(name, total, 0.0, _tell_nothing)

    def cancelled(self) -> bool:
        return self.cancellation.requested


def _tell_nothing(_task: _PlainTask) -> None:
    pass


@dataclass(slots=True)
class LineProgress:
    """A line now and then, never two within `LINE_SECONDS`. `clock` in seconds."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    write: Callable[[str], None] = logger.info
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None

    def task(self, name: str, total: int | None) -> Task:
        now = self.clock()
        self._last = now if self._last is None else self._last
        return _PlainTask(name, total, now, self._tell)

    def cancelled(self) -> bool:
        return self.cancellation.requested

    def _tell(self, task: _PlainTask) -> None:
        now = self.clock()
        if self._last is not None and now - self._last < LINE_SECONDS:
            return
        self._last = now
        if task.total is None:
            self.write(f"{task.name}: {task.done} done")
            return
        left = max(task.total - task.done, 0) * (now - task.started) / max(task.done, 1)
        self.write(f"{task.name}: {task.done} of {task.total}, about {duration_text(left)} left")


@dataclass(slots=True)
class BarProgress:
    """Bars of rich; they vanish when their task ends."""

    bars: RichBars
    cancellation: Cancellation = field(default_factory=Cancellation)

    def task(self, name: str, total: int | None) -> Task:
        return _BarTask(self.bars, self.bars.add_task(name, total=total))

    def cancelled(self) -> bool:
        return self.cancellation.requested


@dataclass(slots=True)
class _BarTask:
    bars: RichBars
    number: TaskID

    def advance(self, count: int = 1) -> None:
        self.bars.advance(self.number, count)

    def __enter__(self) -> _BarTask:
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.remove_task(self.number)


@contextmanager
def planning_progress(rank: int = 0, stream: TextIO | None = None, *, catches_interrupt: bool = True) -> Iterator[Progress]:
    """What this process shall show while it plans, and Ctrl-C caught meanwhile (`catches_interrupt`).

    Bars where `stream` (stderr) is a terminal that can draw them, log lines where not, nothing on ranks but 0. Outside of the main
    thread, where Python delivers no signals, Ctrl-C is left alone.
    """
    cancellation = Cancellation()
    with catch_interrupt(cancellation) if catches_interrupt else nullcontext():
        if rank != 0:
            yield SilentProgress(cancellation)
            return
        stream = sys.stderr if stream is None else stream
        if not stream.isatty() or os.environ.get("TERM", "").lower() in _DUMB_TERMINALS:
            yield LineProgress(cancellation)
            return
        with _rich_bars(stream) as bars:
            yield BarProgress(bars, cancellation)


@contextmanager
def catch_interrupt(cancellation: Cancellation, tell: Callable[[str], None] = logger.warning) -> Iterator[None]:
    """Let the first Ctrl-C set `cancellation` and the second one interrupt; the handler that was there is put back.

    Does nothing outside of the main thread, or where SIGINT is ignored or handled by something else than Python.
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
        tell("Ctrl-C: taking the best plan so far; once more to interrupt")

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def duration_text(seconds: float) -> str:
    """"42 s", "3 min 20 s", "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _rich_bars(stream: TextIO) -> RichBars:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
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
