"""A process that has imported what ranks of the tests need, and forks them: `python template.py SOCKET`, or
`Templates` to use some.

In: connections of forked_rank.py. Out: a forked process for each, which runs the script as if it had been
started with it; its process number, and in the end its wait status, go back over the connection. A closed
connection ends the process: the launcher has killed its rank.

A template has one thread, has neither MPI nor torch.distributed nor a model, and has never traced anything
with the backend. There are two, as strings hash differently in each: ranks that agree only because their sets
have one order would not be noticed otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from tests.distributed.harness.forked_rank import DESCRIPTOR_VARIABLE, receive_job, send_number  # noqa: E402

NUM_TEMPLATES = 2
_FORKED_RANK = Path(__file__).with_name("forked_rank.py")
# The watch of a starting job looks for ranks among the children of their launcher, and these are children of
# a template.
_COUNTS_OF_LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")


class Templates:
    """Some templates, and the command that runs a rank in them. They end with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start them with that environment; ranks wait until they are ready."""
        self._directory = Path(tempfile.mkdtemp(prefix="rannc-"))
        self._sockets = [str(self._directory / str(index)) for index in range(NUM_TEMPLATES)]
        self._processes = [self._start(path, environment) for path in self._sockets]

    def _start(self, path: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno())]
            files = [listener.fileno()]
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, env=dict(environment), pass_fds=files, start_new_session=True
            )

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What a launcher is to start in place of `python *arguments`."""
        assert all(process.poll() is None for process in self._processes), (
            "a template has ended: see its traceback above"
        )
        return [sys.executable, "-I", "-S", str(_FORKED_RANK), ",".join(self._sockets), *arguments]

    def end(self) -> None:
        """End the templates, and with them what runs in them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        shutil.rmtree(self._directory)


def _prepare() -> None:
    """Import what most ranks need, and what the first trace of a process imports or builds."""
    import torch
    from torch import nn
    from tqdm import tqdm

    import rannc_backend.backend
    import rannc_backend.session  # noqa: F401
    import tests.models_huggingface  # noqa: F401

    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread otherwise
    # autograd starts a thread per device when it is first used; under a trace a build for CUDA passes for one
    # with eight devices.
    torch.ones(1, requires_grad=True).sum().backward()
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.LayerNorm(2))
        torch.compile(model, backend="aot_eager", dynamic=True)(torch.ones(3, 2)).sum().backward()
    torch._dynamo.reset()
    # What is here stays: collections need not look at it, and its memory stays shared.
    gc.collect()
    gc.freeze()


class _Server:
    """Forks a process per connection and tells how it ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}  # by process number
        self._selector = selectors.DefaultSelector()
        # A signal that nobody waits for in a system call would only be noticed at the next connection.
        self._wakeup, alarm = socket.socketpair()
        alarm.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(alarm.fileno())
        self._alarm = alarm
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ready in (listener, self._wakeup, sys.stdin):
            self._selector.register(ready, selectors.EVENT_READ)

    def next_job(self) -> dict[str, Any]:
        """In a forked process: the job that it is to do. Never returns in the template."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._end_all()
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    job = self._begin(self._listener.accept()[0])
                    if job is not None:
                        return job
                else:
                    self._end(key.data)

    def _begin(self, connection: socket.socket) -> dict[str, Any] | None:
        try:
            job, descriptors = receive_job(connection)
        except ValueError:
            connection.close()  # a rank that ended while it was being started
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a template with threads cannot be forked"
        process = os.fork()
        if process == 0:
            self._leave(job, descriptors)
            connection.close()
            return job
        for descriptor in descriptors:
            os.close(descriptor)
        self._connections[process] = connection
        self._selector.register(connection, selectors.EVENT_READ, process)
        send_number(connection, process)
        return None

    def _leave(self, job: dict[str, Any], descriptors: list[int]) -> None:
        """Of a forked process: become the rank."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for other in (self._listener, self._wakeup, self._alarm, *self._connections.values()):
            other.close()
        for standard, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.setsid()
        os.chdir(job["directory"])
        os.environ.clear()
        os.environ.update(job["environment"])
        for name in _COUNTS_OF_LOCAL_RANKS:
            os.environ.pop(name, None)
        if descriptors[3:]:
            os.set_inheritable(descriptors[3], True)
            os.environ[DESCRIPTOR_VARIABLE] = str(descriptors[3])

    def _end(self, process: int) -> None:
        """Of a process whose launcher has gone; it may have ended too, a moment ago."""
        if process in self._connections:
            os.kill(process, signal.SIGKILL)
            self._selector.unregister(self._connections[process])

    def _reap(self) -> None:
        while self._connections:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            # The launcher's process may have gone too, known here or not yet.
            with self._connections.pop(process) as connection, contextlib.suppress(KeyError, OSError):
                self._selector.unregister(connection)
                send_number(connection, status)

    def _end_all(self) -> None:
        for process in self._connections:
            os.kill(process, signal.SIGKILL)
        os._exit(0)


def main(listener: int) -> None:
    """Serve; in a forked process run the script."""
    _prepare()
    job = _Server(socket.socket(fileno=listener)).next_job()
    sys.argv = job["arguments"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
