"""Progress: lines not too often and with the time left, bars on a terminal only, and what Ctrl-C does."""

from __future__ import annotations

import io
import signal
import threading

import pytest

from rannc_backend.log.progress import (
    LINE_SECONDS,
    BarProgress,
    Cancellation,
    LineProgress,
    Progress,
    catch_interrupt,
    duration_text,
    planning_progress,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_far_apart_and_say_what_is_left() -> None:
    now, lines = [100.0], []
    progress = LineProgress(write=lines.append, clock=lambda: now[0])
    with progress.task("profiling", 40) as task:
        for _ in range(30):
            now[0] += 1
            task.advance()
    assert lines == [
        "profiling: 10 of 40, about 30 s left",
        "profiling: 20 of 40, about 20 s left",
        "profiling: 30 of 40, about 10 s left",
    ]
    with progress.task("search", None) as task:
        now[0] += LINE_SECONDS - 1
        task.advance(3)
        now[0] += 1
        task.advance(4)
        task.advance(1)
    assert lines[3:] == ["search: 7 done"]


def test_a_short_task_says_nothing() -> None:
    lines = []
    progress = LineProgress(write=lines.append, clock=lambda: 5.0)
    with progress.task("search", 2) as task:
        task.advance(2)
    assert lines == []


def test_a_terminal_gets_bars_and_no_other_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    with planning_progress(stream=terminal) as progress:
        assert isinstance(progress, LineProgress), "one that cannot go back to the begin of a line"
    monkeypatch.setenv("TERM", "xterm")
    with planning_progress(stream=terminal) as progress:
        assert isinstance(progress, BarProgress)
        with progress.task("search [bold]", 3) as task:
            task.advance(2)
            progress.bars.refresh()
    assert "search [bold]" in terminal.getvalue() and "2/3" in terminal.getvalue()
    with planning_progress(stream=pipe) as progress:
        assert isinstance(progress, LineProgress)
    with planning_progress(rank=3, stream=terminal) as progress:
        assert type(progress) is Progress
        with progress.task("search", 3) as task:
            task.advance(1)
    assert pipe.getvalue() == ""


def test_the_first_interrupt_cancels_the_second_one_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), planning_progress(stream=io.StringIO()) as progress:
        assert not progress.cancelled()
        signal.raise_signal(signal.SIGINT)
        assert progress.cancelled()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_of_the_user_comes_back_and_gets_the_second_interrupt() -> None:
    seen, told, cancellation = [], [], Cancellation()
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)
        with catch_interrupt(cancellation, told.append):
            signal.raise_signal(signal.SIGINT)
            assert (seen, cancellation.requested, len(told)) == ([], True, 1)
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_interrupts_stay_ignored_and_other_threads_change_no_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with catch_interrupt(Cancellation()):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    handlers = []

    def work() -> None:
        with planning_progress(stream=io.StringIO()):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_durations() -> None:
    assert [duration_text(seconds) for seconds in (0.2, 59.4, 200, 3900)] == [
        "0 s",
        "59 s",
        "3 min 20 s",
        "1 h 5 min",
    ]
