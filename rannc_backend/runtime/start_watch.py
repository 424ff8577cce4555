"""Watches the other ranks of this host while this one waits for them to start.

In: the environment of a rank. Out: nothing, or, when another rank of this host has ended before the job stood: one message, and
the end of the waiting rank. A process of its own, standard library only (`python -I -S start_watch.py`), because MPI_Init holds the
interpreter's lock for as long as it waits, and no rank can hear of another before MPI stands.

Terms: the *launcher process* is the nearest ancestor whose environment has no rank (mpirun's local daemon, torchrun's agent); its
children with a rank are the ranks of this host.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

# Rank, number of ranks on this host and in all, by launcher.
VARIABLES = (
    ("PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
)
_POLL_SECONDS = 0.2
# A launcher starts its ranks one by one: who is missing for a moment may not have been started yet.
_MISSING_SECONDS = 1.0
_TERM_SECONDS = 1.0


class StartWatch:
    """The watch of this process. Use as a context around the start."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._known = any(rank in environ and size in environ for rank, size, _ in VARIABLES)
        self._watch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StartWatch:
        if self._known and os.path.isdir("/proc/self"):
            command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
            self._watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            assert self._watch.stdin is not None
            self._watch.stdin.close()
            self._watch.wait()


def environment_of(pid: int) -> dict[str, str]:
    """Environment with which a process was started; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; the fields after it do not.
            return int(file.read().rsplit(b")", 1)[1].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def launcher_of(pid: int, rank_name: str) -> int:
    """The launcher process above a rank; 0 if there is none to be seen."""
    parent = parent_of(pid)
    while parent > 1 and rank_name in environment_of(parent):
        parent = parent_of(parent)
    return parent if parent > 1 else 0


def ranks_below(launcher: int, rank_name: str) -> set[int]:
    """Ranks of the launcher's living children."""
    children = [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent_of(int(name)) == launcher]
    texts = [environment_of(child).get(rank_name, "") for child in children]
    return {int(text) for text in texts if text.isdecimal()}


def _watch(pid: int, rank_name: str, num_local_ranks: int, num_ranks: int) -> None:
    """Until told to stop: end process `pid` if a rank of this host has gone."""
    launcher = launcher_of(pid, rank_name)
    if launcher == 0:
        return
    # One that ended before this one looked can be named where all ranks are on this host.
    seen = set(range(num_ranks)) if num_ranks == num_local_ranks else set[int]()
    missing_since: float | None = None
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        alive = ranks_below(launcher, rank_name)
        seen |= alive
        if len(alive) >= num_local_ranks:
            missing_since = None
        elif missing_since is None:
            missing_since = time.monotonic()
        elif time.monotonic() - missing_since > _MISSING_SECONDS:
            _end(pid, launcher, seen - alive, num_local_ranks - len(alive))
            return


def _end(pid: int, launcher: int, gone: set[int], num_gone: int) -> None:
    lock = socket.socket(socket.AF_UNIX)
    try:
        # The watches of all ranks come to the same end; the name is the host's and goes with the process.
        lock.bind(f"\0rannc-start-{launcher}")
        names = f"rank {', '.join(map(str, sorted(gone)))}" if gone else f"{num_gone} rank(s)"
        message = (
            f"[rannc] the job has ended because of {names} (host {socket.gethostname()})\n"
            "[rannc]   in     before its first call of a compiled model\n"
            "[rannc]   cause  it ended while the others wait for it to start; what it printed says why\n"
        )
        os.write(2, message.encode())
    except OSError:
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, number)
        if select.select([sys.stdin], [], [], _TERM_SECONDS)[0]:
            return


def main() -> None:
    # Ctrl-C is for the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for rank_name, size_name, all_name in VARIABLES:
        size, all_ranks = os.environ.get(size_name, ""), os.environ.get(all_name, "")
        if rank_name in os.environ and size.isdecimal():
            _watch(int(sys.argv[1]), rank_name, int(size), int(all_ranks) if all_ranks.isdecimal() else 0)
            return


if __name__ == "__main__":
    main()
