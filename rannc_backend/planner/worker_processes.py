"""Processes that compute parts of a plan beside this one: option search_processes.

In: a function of a module of this package, what all of its calls share, and the items. Out: the results, in the sequence of
the items, the same as without processes: a call must depend on nothing else.

Processes are started by their command, not by forking or by `multiprocessing`: a fork of a process with threads and MPI may
hang, and `multiprocessing` would run the user's script again. They import no torch, have no signals of their own, and end when
their input does. Waits are bounded. What a process could not do, because it ended or took too long, is computed here, with
a line in the log.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_START = (
    "import sys; sys.path[:] = {path!r}; from rannc_backend.planner.worker_processes import serve; serve()"
)
_END_SECONDS = 5.0  # for a process to end by itself
_SHARED, _ITEM = "shared", "item"

Call = Callable[[Any, Any], Any]
"""Of what is shared and an item; known by the name of its module and its own."""


@dataclass(slots=True, eq=False, kw_only=True)
class Workers:
    """So many processes, started when first needed, for one batch of calls at a time. Use as a context. `pids`: of those that
    have computed something for this one, which is among them where it had to.
    """

    num_processes: int
    limit_seconds: float
    pids: set[int] = field(default_factory=set)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Call, shared: Any, items: Sequence[Any]) -> list[Any]:
        """`function(shared, item)` of all items."""
        return self.start(function, shared, items).wait()

    def start(self, function: Call, shared: Any, items: Sequence[Any]) -> Batch:
        """The same, to be waited for later. With one process nothing is computed before that."""
        batch = Batch(workers=self, function=function, shared=shared, items=items)
        if self.num_processes > 1 and len(items) > 1:
            self._start_processes()
            batch.start(self._processes)
        return batch

    def _start_processes(self) -> None:
        if self._processes:
            return
        command = [sys.executable, "-c", _START.format(path=sys.path)]
        for _ in range(self.num_processes):
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                logger.warning("no process could be started to search in (%s)", error)
                return
            self._processes.append(process)
        logger.info("searching in processes %s", ", ".join(str(each.pid) for each in self._processes))

    def end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """End processes, whatever they do."""
        for process in processes:
            process.kill()
            process.wait(_END_SECONDS)
            self._processes.remove(process)

    def close(self) -> None:
        """End all processes: without input they have nothing to do."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_SECONDS)
        self._processes.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """Calls that are on their way."""

    workers: Workers
    function: Call
    shared: Any
    items: Sequence[Any]
    _results: dict[int, Any] = field(default_factory=dict)
    _open: deque[int] = field(init=False)  # items that no process has taken
    _threads: dict[threading.Thread, subprocess.Popen[bytes]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._open = deque(range(len(self.items)))

    def start(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Give the items to processes."""
        shared = pickle.dumps((_SHARED, (self.function, self.shared)), protocol=5)
        for process in processes[: len(self.items)]:
            thread = threading.Thread(target=self._feed, args=(process, shared), daemon=True)
            self._threads[thread] = process
            thread.start()

    def _feed(self, process: subprocess.Popen[bytes], shared: bytes) -> None:
        """Give a process one item after the other."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        # Of a process that has ended, the result is missing.
        with suppress(OSError, EOFError, ValueError):
            _write(process.stdin, shared)
            while self._open:
                try:
                    number = self._open.popleft()
                except IndexError:  # taken meanwhile
                    return
                _write(process.stdin, pickle.dumps((_ITEM, self.items[number]), protocol=5))
                is_result, value = pickle.loads(_read(process.stdout))
                if is_result:
                    self._results[number] = value
                    self.workers.pids.add(process.pid)
                else:
                    logger.warning("a search in process %d ended with %s", process.pid, value)

    def wait(self) -> list[Any]:
        """The results in the sequence of the items; what is missing is computed here."""
        try:
            for thread in self._threads:
                thread.join(max(0.0, self._began + self.workers.limit_seconds - time.monotonic()))
        finally:
            self.stop()
        missing = [number for number in range(len(self.items)) if number not in self._results]
        if self._threads and missing:
            logger.warning(
                "%d of %d searches were not done by other processes, and are done here",
                len(missing),
                len(self.items),
            )
        for number in missing:
            self._results[number] = self.function(self.shared, self.items[number])
            self.workers.pids.add(os.getpid())
        return [self._results[number] for number in range(len(self.items))]

    def stop(self) -> None:
        """Wait no longer: processes that are at it, and those that have ended, are of no more use."""
        self._open.clear()
        of_no_use = [
            process
            for thread, process in self._threads.items()
            if thread.is_alive() or process.poll() is not None
        ]
        self.workers.end(of_no_use)
        for thread in self._threads:
            thread.join(_END_SECONDS)


def serve() -> None:
    """What such a process does: answer until its input ends."""
    # Of the terminal; the process that asks ends this one.
    hooks.handle_signal("helper's signals", signal.SIGINT, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    with suppress(EOFError, BrokenPipeError):
        while True:
            kind, item = pickle.loads(_read(source))
            if kind == _SHARED:
                function, shared = item
                continue
            try:
                answer = (True, function(shared, item))
            except Exception as error:  # of the search, whatever it is
                answer = (False, f"{type(error).__name__}: {error}")
            _write(sink, pickle.dumps(answer, protocol=5))


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data
