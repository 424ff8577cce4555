"""How a rank comes to the job's monitor process: rank 0 starts it, all ranks connect to it.

In: an address, a token. Out: a connected socket, or an error with the reason.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from rannc_backend.errors import CommunicationError, LaunchError
from rannc_backend.runtime.job import helper, monitor_wire
from rannc_backend.runtime.job.monitor import LinkMonitor
from rannc_backend.runtime.job.monitor_wire import COOKIE_BYTES, PHASE_BYTES, WireError
from rannc_backend.runtime.processes import mark_of

# Ranks join as soon as they have the address.
_JOIN_SECONDS = 30.0


_JOIN_AGAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAddress:
    """Where the job's monitor process is, and what a rank must have.

    Attributes:
        folder: a folder of mode 0700 on its host, which it removes at the end of the job; "" if there is
        none.
    """

    host: str
    port: int
    token: str
    folder: str = ""


def start_supervisor(*, size: int, bind: str, failed_first: bool, folder_in: str = "") -> SupervisorAddress:
    """Start the job's monitor process on this host.

    Args:
        bind, failed_first: as in `supervisor.Supervisor`.
        folder_in: where to make the job's private folder; "" for none.
    """
    token = monitor_wire.new_token()
    # A session of its own: neither the terminal's Ctrl-C nor the launcher's kill of the process group reaches
    # it.
    supervisor = subprocess.Popen(
        helper.command_of("supervisor"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert supervisor.stdin is not None and supervisor.stdout is not None
    options = {
        "size": size,
        "token": token,
        "bind": bind,
        "failed_first": failed_first,
        "folder_in": folder_in,
    }
    supervisor.stdin.write(json.dumps(options) + "\n")
    supervisor.stdin.close()
    answer = supervisor.stdout.readline()
    supervisor.stdout.close()
    supervisor.returncode = 0  # nobody waits for it: it outlives this process
    if not answer:
        raise LaunchError(
            "the job's monitor process did not start", cure=f"see whether {sys.executable} -I -S works."
        )
    port, folder = json.loads(answer)
    return SupervisorAddress(host=bind, port=port, token=token, folder=folder)


def join_supervisor(
    address: SupervisorAddress,
    *,
    rank: int,
    own_host: str,
    limit_seconds: float,
    silence_seconds: float = 600.0,
) -> LinkMonitor:
    """Connect this rank to the job's monitor process, within ``limit_seconds``; ``silence_seconds``: see
    `LinkMonitor`.

    Raises:
        CommunicationError: it cannot be reached, or is not the monitor of this job.
    """
    memory, descriptor = make_phase_memory(address.token)
    own = mark_of(os.getpid())
    hello = {
        "type": "hello",
        "host": own_host,
        "pid": own.pid,
        "start_ticks": own.start_ticks,
        "space": own.space,
        "memory": descriptor,
    }
    try:
        connection = _connect(address, rank=rank, limit_seconds=limit_seconds)
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.settimeout(None)
    except (OSError, WireError) as error:
        where = f"{address.host}:{address.port}"
        raise CommunicationError(
            f"no connection to the job's monitor at {where}: {error}", rank=rank
        ) from error
    monitor = LinkMonitor(connection, memory, rank=rank, limit_seconds=silence_seconds)
    monitor.phase("start")
    monitor.run()
    return monitor


def _connect(address: SupervisorAddress, *, rank: int, limit_seconds: float) -> socket.socket:
    """A connection after the handshake. The monitor drops the oldest strangers when there is a crowd: then
    once more.
    """
    until = time.monotonic() + min(limit_seconds, _JOIN_SECONDS)
    while True:
        left_seconds = max(0.001, until - time.monotonic())
        connection = socket.create_connection((address.host, address.port), timeout=left_seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            monitor_wire.shake_hands(connection, address.token, rank=rank, limit_seconds=left_seconds)
            return connection
        except (OSError, WireError) as error:
            connection.close()
            if not isinstance(error, ConnectionError) or time.monotonic() > until:
                raise
            time.sleep(_JOIN_AGAIN_SECONDS)


def make_phase_memory(token: str) -> tuple[mmap.mmap, int]:
    """Memory for the phase, and the descriptor under which the supervisor can open it; -1 where there is no
    such thing.
    """
    try:
        descriptor = os.memfd_create("rannc-phase")
        os.ftruncate(descriptor, PHASE_BYTES)
        memory = mmap.mmap(descriptor, PHASE_BYTES)
    except (AttributeError, OSError):
        memory, descriptor = mmap.mmap(-1, PHASE_BYTES), -1
    memory[:COOKIE_BYTES] = monitor_wire.cookie_of(token)
    return memory, descriptor
