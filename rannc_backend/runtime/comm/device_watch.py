"""Notices messages that were queued on a device and do not move, since the host waits for none of them.

In: for each message how to ask whether it is done, with whom it is, what it is. Out: this rank's report to
the monitor, which ends the job, when nothing has moved for the limit; and, while the oldest message waits,
word to the monitor for whom it waits, so that a rank that has left is noticed at once.

A thread of its own asks; asking never waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rannc_backend.errors import CommunicationError

POLL_SECONDS = 0.5


class Reporter(Protocol):
    """The monitor, as the watch sees it."""

    def begin_wait(self, ranks: tuple[int, ...]) -> None: ...
    def end_wait(self) -> None: ...
    def current_phase(self) -> str: ...
    def report_error(self, error: BaseException) -> None: ...


@dataclass(slots=True, eq=False)
class _Queued:
    is_done: Callable[[], bool]
    peers: tuple[int, ...]
    what: str
    phase: str  # what the host was doing when it queued this: step, stage, micro-batch


class DeviceWatch:
    """See the module docstring.

    Args:
        limit_seconds: time without any message moving after which the oldest one is reported.
        clock: seconds.
        start_thread: False leaves the asking to `look`, for tests.
    """

    def __init__(
        self,
        reporter: Reporter,
        *,
        rank: int,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        start_thread: bool = True,
    ) -> None:
        self._reporter = reporter
        self._rank = rank
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._start_thread = start_thread
        self._queued: list[_Queued] = []
        self._lock = threading.Lock()
        self._last_move = 0.0
        self._waiting_for: _Queued | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: CommunicationError | None = None

    def limit_waits(self, seconds: float) -> None:
        """From now on the time after which a message that does not move is reported."""
        self._limit_seconds = seconds

    def add(self, is_done: Callable[[], bool], peers: tuple[int, ...], what: str) -> None:
        """Watch one more message; ``is_done`` raises RuntimeError when it has failed."""
        queued = _Queued(is_done, peers, what, self._reporter.current_phase())
        with self._lock:
            if not self._queued:
                self._last_move = self._clock()
            self._queued.append(queued)
        if self._thread is None and self._start_thread:
            self._thread = threading.Thread(target=self._run, name="rannc-device-watch", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Drop what is done; report what has failed, and the oldest of the others if nothing has moved for
        too long.
        """
        with self._lock:
            candidates = list(self._queued)
        done = set()
        for queued in candidates:
            try:
                if queued.is_done():
                    done.add(id(queued))
            except RuntimeError as error:  # NCCL has found a broken connection
                self._fail(self._error(queued, f"broke: {error}"))
                return
        with self._lock:
            self._queued = [queued for queued in self._queued if id(queued) not in done]
            oldest = self._queued[0] if self._queued else None
            if done:
                self._last_move = self._clock()
            stuck = oldest is not None and self._clock() - self._last_move > self._limit_seconds
        self._log_for_whom(oldest)
        if stuck and oldest is not None:
            self._fail(self._error(oldest, "did not complete in time", self._limit_seconds))

    def raise_failure(self) -> None:
        """Raise what `look` has found.

        Raises:
            CommunicationError: a message or reduction has broken, or does not move.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop watching: everything is done, or nobody cares any more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * POLL_SECONDS)
        with self._lock:
            self._queued.clear()
        self._log_for_whom(None)

    def _fail(self, error: CommunicationError) -> None:
        self._failure = error
        self._reporter.report_error(error)
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                self.look()
            except Exception as error:  # a watch that has died would let a later message hang
                self._fail(
                    CommunicationError(
                        f"what is queued on the device cannot be watched: {type(error).__name__}: {error}",
                        rank=self._rank,
                    )
                )

    def _log_for_whom(self, oldest: _Queued | None) -> None:
        if oldest is self._waiting_for:
            return
        if oldest is None:
            self._reporter.end_wait()
        else:
            self._reporter.begin_wait(oldest.peers)
        self._waiting_for = oldest

    def _error(self, oldest: _Queued, problem: str, limit_seconds: float | None = None) -> CommunicationError:
        peer = oldest.peers[0] if len(oldest.peers) == 1 else None
        text = f"{oldest.what}, queued in: {oldest.phase}, {problem}"
        return CommunicationError(text, rank=self._rank, peer=peer, limit_seconds=limit_seconds)
