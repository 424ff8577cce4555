"""Does two computations at the same time, where there are cores for it and a copy of the process is safe.

In: two functions that change nothing outside of themselves. Out: what both give, as if they had been called one after the other.
For seconds of NumPy and Python before there is any rank: the second function runs in a forked process, whose result is pickled back.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Here = TypeVar("Here")
Beside = TypeVar("Beside")

# A copy that takes so much longer than the other half is not waited for: the process had a lock, say, when it was copied.
_TIMES_AS_LONG, _MORE_SECONDS = 10.0, 5.0
_CHUNK_BYTES = 1 << 20


def side_by_side(here: Callable[[], Here], beside: Callable[[], Beside]) -> tuple[Here, Beside]:
    """The results of both. Their exceptions are raised as if `beside` had been called after `here`."""
    if not _can_fork():
        return here(), beside()
    copy = _Copy(beside)
    begin = time.monotonic()
    try:
        own = here()
        result = copy.result(_TIMES_AS_LONG * (time.monotonic() - begin) + _MORE_SECONDS)
    finally:
        copy.end()
    return own, beside() if result is None else pickle.loads(result)


def _can_fork() -> bool:
    """torch has threads and devices of its own, and ranks share the cores as it is."""
    has_cores = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    return has_cores and "torch" not in sys.modules and threading.current_thread() is threading.main_thread()


class _Copy:
    """A forked process that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._answer, question = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(question)
            return
        try:
            with open(question, "wb") as file:
                file.write(pickle.dumps(function(), protocol=pickle.HIGHEST_PROTOCOL))
            os._exit(0)
        finally:
            os._exit(1)

    def result(self, limit_seconds: float) -> bytes | None:
        """The pickled result; None if there is none, or none within the limit."""
        chunks, end = [], time.monotonic() + limit_seconds
        while select.select([self._answer], [], [], max(0.0, end - time.monotonic()))[0]:
            chunk = os.read(self._answer, _CHUNK_BYTES)
            if not chunk:
                _, status = os.waitpid(self._pid, 0)
                self._pid = 0
                return b"".join(chunks) or None if status == 0 else None
            chunks.append(chunk)
        return None

    def end(self) -> None:
        """Leave nothing behind."""
        os.close(self._answer)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
