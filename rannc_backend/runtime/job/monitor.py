"""This rank's side of the job's monitor: notes phases and calls, reports failures, and ends the process when
told.

In: phases and calls from the executor, failures from `exit_hooks`. Out: messages to the supervisor
(`supervisor`), and the end of this process when any rank of the job fails. Terms: as in `supervisor` and
`world`; a *needed* rank is one that left in good order before this rank's latest call, which it would have
had to enter too.

A daemon thread listens to the supervisor. It ends the process by `os._exit`, because the main thread may sit
in a wait inside C++ that nothing else could interrupt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rannc_backend.errors import CommunicationError, RankFailedError
from rannc_backend.runtime.job import last_words, monitor_wire, supervisor
from rannc_backend.runtime.job.monitor_wire import COOKIE_BYTES, Lines, WireError
from rannc_backend.runtime.world import RankState

_LOG = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_DIAGNOSIS_SECONDS = 4.0
_LAST_WORDS_SECONDS = 1.5
_FLUSH_SECONDS = 0.5
_SURVEY_SECONDS = 2.0
_LAST_MESSAGE_SECONDS = 1.0
_LOOK_SECONDS = 10.0
_NEVER = sys.maxsize
_MAX_CAUSE_LINES = 8
_MAX_CAUSE_CHARACTERS = 1000
_MAX_TRACE_BYTES = 24_000


class SingleMonitor:
    """Monitor of a job of one process: there is nobody to tell."""

    def __init__(self) -> None:
        self.text = ""

    def phase(self, text: str) -> None:
        self.text = text

    def current_phase(self) -> str:
        return self.text

    def begin_call(self) -> None:
        return

    def report_error(self, error: BaseException) -> None:
        return

    def survey(self) -> list[RankState]:
        return []

    def close(self) -> None:
        return


class LinkMonitor:
    """Monitor of a rank among others. Made by `join_supervisor`.

    Args:
        connection: to the supervisor, hello already sent.
        memory: phase memory, shared with the supervisor where that is possible.
        limit_seconds: longest time at the end without a sign of life from a rank that is waited for, or from
        the supervisor.
    """

    def __init__(
        self, connection: socket.socket, memory: mmap.mmap, *, rank: int, limit_seconds: float = 600.0
    ) -> None:
        self.rank = rank
        self._limit_seconds = limit_seconds
        self.exit_code = 0
        self._connection = connection
        self._memory = memory
        self._send_lock = threading.Lock()
        self._num_calls = 0
        self._least_left = _NEVER  # fewest calls with which a rank has left
        self._left: dict[int, int] = {}  # rank that has left -> its number of calls
        self._num_waits = 0
        self._waiting_for: tuple[int, ...] = ()
        self._reported = False
        self._unreported_trace = ""  # the traceback, if the supervisor does not come to tell it
        self._ended = threading.Event()
        self._bye = threading.Event()
        self._states = threading.Event()
        self._last_states: list[RankState] = []
        self._wake, self._woken = socket.socketpair()
        self._on_signal: Callable[[int], None] | None = None
        self._thread = threading.Thread(target=self._listen, name="rannc-monitor", daemon=True)

    def run(self) -> None:
        """Start listening."""
        self._thread.start()

    @property
    def signal_descriptor(self) -> int:
        """Where `signal.set_wakeup_fd` shall write, so that signals are seen while the main thread is in
        C++.
        """
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        return self._wake.fileno()

    def phase(self, text: str) -> None:
        data = text.encode()[:255]
        self._memory[COOKIE_BYTES : COOKIE_BYTES + 1 + len(data)] = bytes((len(data),)) + data

    def current_phase(self) -> str:
        """The text of the last `phase`."""
        return supervisor.read_phase(self._memory)

    def begin_call(self) -> None:
        self._num_calls += 1
        if self._num_calls > self._least_left:
            rank = min(self._left, key=lambda rank: self._left[rank])
            self._report_left(rank)
            raise RankFailedError(rank=rank, cause="it left the job while this rank still needs it")

    def begin_wait(self, ranks: tuple[int, ...]) -> None:
        """From now on this rank waits for a message of `ranks`; `end_wait` ends it."""
        self._num_waits += 1
        self._waiting_for = ranks
        if self._left:
            for rank in ranks:
                if rank in self._left:
                    self._watch_wait(rank)

    def end_wait(self) -> None:
        self._waiting_for = ()

    def survey(self) -> list[RankState]:
        # One heartbeat more, so that a rank is not called silent for having just been heard.
        time.sleep(HEARTBEAT_SECONDS)
        self._states.clear()
        self._send({"type": "survey"})
        return self._last_states if self._states.wait(_SURVEY_SECONDS) else []

    def close(self, note: str = "") -> None:
        """Say goodbye and wait for the others to do so, for as long as they give signs of life. Ends the
        process with their code if one of them fails.

        Args:
            note: what went wrong here before; told if the others turn out to need this rank.
        """
        self._send({"type": "leave", "note": clip(note), **self._place()})
        answered = time.monotonic()
        while not self._bye.wait(min(self._limit_seconds / 4, _LOOK_SECONDS)):
            states = [] if self._ended.is_set() else self.survey()
            if self._ended.is_set():
                self.await_end()
            if self._bye.is_set():
                break
            answered = time.monotonic() if states else answered
            self._check_signs_of_life(states, time.monotonic() - answered)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self.drop()

    def _check_signs_of_life(self, states: list[RankState], silent_seconds: float) -> None:
        """End the job if a rank that has not left is silent for too long; end this rank if the supervisor is,
        which could end nobody.
        """
        if silent_seconds > self._limit_seconds:
            silence = f"the job's monitor has not answered for {silent_seconds:.0f} s"
            sys.stderr.write(f"[rannc] rank {self.rank}: {silence}; the others are not waited for\n")
            end_process(1)
        silent = [
            state
            for state in states
            if not state.left and state.rank != self.rank and state.silent_seconds > self._limit_seconds
        ]
        if silent:
            names = ", ".join(f"rank {state.rank}" for state in silent)
            self.report("communication", f"waiting for the end of {names} (limit {self._limit_seconds:g} s)")
            self.await_end()

    def drop(self) -> None:
        """Close the connection without a word, as a forked child must with its parent's."""
        for end in (self._connection, self._wake, self._woken):
            end.close()

    def report_error(self, error: BaseException, trace: str = "") -> None:
        """Tell the supervisor that `error` ends this rank. Does not wait. `trace`: what to show of its
        traceback.
        """
        if isinstance(error, KeyboardInterrupt):
            self.report("interrupt", last_words.INTERRUPTED, code=130)
            return
        is_others = (
            isinstance(error, (CommunicationError, RankFailedError))
            or getattr(error, "failed_rank", None) is not None
        )
        parts = last_words.parts_of(error)
        self.report(
            "communication" if is_others else "exception",
            parts.cause,
            location=parts.place,
            cure=parts.cure,
            trace=trace,
        )

    def report(
        self,
        kind: str,
        cause: str,
        *,
        location: str = "",
        cure: str = "",
        trace: str = "",
        code: int = 1,
        rank: int | None = None,
    ) -> None:
        """Tell the supervisor of a failure of this rank, or of `rank`. Only the first report of a process
        counts.
        """
        if self._reported:
            return
        self._reported = True
        self.exit_code = code
        self._unreported_trace = trace
        message = {
            "type": "fail",
            "kind": kind,
            "cause": clip(cause),
            "location": clip(location),
            "code": code,
        }
        message |= {"cure": clip(cure)} if cure else {}
        message |= {"trace": clip_trace(trace)} if trace else {}
        self._send({**message, **self._place(), "rank": self.rank if rank is None else rank})

    def await_end(self) -> NoReturn:
        """Wait until the supervisor has spoken, then end the process."""
        if not self._ended.wait(_DIAGNOSIS_SECONDS):
            sys.stderr.write(self._unreported_trace)
        end_process(self.exit_code or 1)

    @property
    def is_failing(self) -> bool:
        """This rank has reported a failure, or the job is ending."""
        return self._reported or self._ended.is_set()

    def watch_signals(self, on_signal: Callable[[int], None]) -> None:
        """Call `on_signal` in the listening thread for each signal that has a Python handler."""
        self._on_signal = on_signal

    def _place(self) -> dict[str, Any]:
        return {"phase": supervisor.read_phase(self._memory), "num_calls": self._num_calls}

    def _send(self, message: dict[str, Any]) -> None:
        # A lost supervisor is noticed by the listening thread.
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        lines = Lines(monitor_wire.MAX_SURVEY_BYTES)
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._send({"type": "beat", **self._place()})
                next_beat = now + HEARTBEAT_SECONDS
            try:
                ready, _, _ = select.select(
                    [self._connection, self._woken], [], [], max(0.0, next_beat - now)
                )
                data = self._connection.recv(65536) if self._connection in ready else None
                numbers = self._woken.recv(64) if self._woken in ready else b""
            except (OSError, ValueError):
                data, numbers = b"", b""
            for number in numbers:
                if self._on_signal is not None:
                    self._on_signal(number)
            if data == b"":
                self._lost_supervisor()
                return
            try:
                for message in lines.feed(data or b""):
                    self._take(message)
            except WireError:
                self._lost_supervisor()
                return

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "end":
            self.exit_code = self.exit_code or monitor_wire.required(message, "code")[0]
            reported = self._reported
            self._ended.set()
            # A rank that has failed by itself is on its way out, and may run what the user wants run at exit.
            self._end_soon(_LAST_WORDS_SECONDS if reported else 0.0)
        elif kind == "left":
            rank, num_calls = monitor_wire.required(message, "rank", "num_calls")
            if rank == self.rank:
                return
            self._left[rank] = num_calls
            self._least_left = min(self._least_left, num_calls)
            if self._num_calls > num_calls:
                self._report_left(rank)
            elif rank in self._waiting_for:
                self._watch_wait(rank)
        elif kind == "states":
            self._last_states = [_state_of(state) for state in monitor_wire.required(message, "states")[0]]
            self._states.set()
        elif kind == "bye":
            self._bye.set()

    def _watch_wait(self, rank: int) -> None:
        """Report `rank`, which has left, if this rank's wait for it goes on: what it sent last arrives within
        moments.
        """
        number = self._num_waits

        def look() -> None:
            time.sleep(_LAST_MESSAGE_SECONDS)
            if self._waiting_for and self._num_waits == number:
                self._report_left(rank)

        call_in_thread(look)

    def _report_left(self, rank: int) -> None:
        """Report that `rank` has left although this rank needs it."""
        where = supervisor.read_phase(self._memory)
        cause = (
            f"it left the job (end of the script, or sys.exit) while rank {self.rank} needs it in: {where}"
        )
        self.report("left", cause, rank=rank)

    def _lost_supervisor(self) -> None:
        if self._bye.is_set() or self._ended.is_set():
            return
        # The supervisor outlives every rank, so its host, or rank 0's whole job step, has been killed.
        sys.stderr.write(
            f"[rannc] rank {self.rank}: the job's monitor has gone, and with it the host of rank 0\n"
            f"{self._unreported_trace}"
        )
        self.exit_code = self.exit_code or 1
        self._ended.set()
        self._end_soon(0.0)

    def _end_soon(self, grace_seconds: float) -> NoReturn:
        time.sleep(grace_seconds)
        end_process(self.exit_code or 1)


def call_in_thread(function: Callable[[], None]) -> threading.Thread | None:
    """Call a function in a thread of its own; here and now (None) where there can be none, as in Python 3.12
    while it shuts down.
    """
    thread = threading.Thread(target=function, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        function()
        return None
    return thread


def end_process(code: int) -> NoReturn:
    """End this process now, whatever its other threads do, with its output flushed."""
    # A thread that sits in a full pipe holds the lock of its stream, so flushing may not be waited for.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(
            _FLUSH_SECONDS + 1.0, exit=True, file=nowhere
        )  # needs no thread of Python
        flusher = call_in_thread(_flush)
        if flusher is not None:
            flusher.join(_FLUSH_SECONDS)
        REAL_EXIT(code)
    raise AssertionError("os._exit does not return")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# Kept here because exit_hooks puts a wrapper in its place.
REAL_EXIT = os._exit


def clip(text: str) -> str:
    """The first lines of a text, for a block that must stay short."""
    lines = text[:_MAX_CAUSE_CHARACTERS].splitlines()
    return "\n".join(lines[:_MAX_CAUSE_LINES])


def clip_trace(text: str) -> str:
    """The end of a traceback, as much as goes into a message."""
    lines = text.splitlines(keepends=True)
    most, start = _MAX_TRACE_BYTES, len(lines)
    while start > 0 and (most := most - len(json.dumps(lines[start - 1]))) >= 0:
        start -= 1
    return "".join(lines[start:])


def _state_of(state: Any) -> RankState:
    """One rank's state, as the supervisor tells it."""
    if not isinstance(state, dict):
        raise WireError("a state that is no object")
    monitor_wire.check(state, monitor_wire.STATE_MEMBERS)
    monitor_wire.required(state, *monitor_wire.STATE_MEMBERS)
    return RankState(**state)
