"""Watches the other ranks of this host from the moment in which this one looks the backend up until the job stands.

In: the environment of a rank. Out: nothing, or, when another rank of this host has ended before the job stood: one message, and
the end of this rank. A process of its own, standard library only (`python -I -S start_watch.py`), because MPI_Init holds the
interpreter's lock for as long as it waits, and no rank can hear of another before MPI stands.

Terms: the *launcher process* is the nearest ancestor whose environment has no rank (mpirun's local daemon, torchrun's agent); its
children with a rank are the ranks of this host. A rank ends *in order* without an error and with exit code 0: the others go on
then, as they may be about to end too, until they wait for it. They know by its watch, which stays until they have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

# Rank, number of ranks on this host and in all, by launcher.
VARIABLES = (
    ("PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
)
_POLL_SECONDS = 0.2
# A launcher starts its ranks one by one: who was never seen is missed only when this rank is as old as this.
_ALL_STARTED_SECONDS = 3.0
_TERM_SECONDS = 1.0
_STAY_SECONDS = 1.0

# What a rank tells its watch.
_WAITS, _STANDS, _ENDS = b"w", b"s", b"e"


class StartWatch:
    """The watch of this process: from `begin` to the end of its use as a context, which is around the start."""

    def __init__(self) -> None:
        self._watch: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._asked_code: object = None  # of the last sys.exit; somebody may have caught it

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start the watch, where the environment tells of other ranks on this host. Once per process."""
        others = any(rank in environ and environ.get(size, "1") != "1" for rank, size, _ in VARIABLES)
        if not others or self._pid == os.getpid() or not os.path.isdir("/proc/self"):
            return
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._watch, self._pid = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL), os.getpid()
        original = sys.exit

        def recording(status: Any = None, /) -> NoReturn:
            self._asked_code = status
            original(status)

        sys.exit = recording
        atexit.register(self._at_exit)

    def __enter__(self) -> StartWatch:
        self._tell(_WAITS)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(_STANDS)
        if self._own is not None:
            self._own.wait()
        self._watch = None

    def _at_exit(self) -> None:
        if getattr(sys, "last_type", None) is None and not self._asked_code:
            self._tell(_ENDS)

    @property
    def _own(self) -> subprocess.Popen[bytes] | None:
        """None also in a forked child, whose parent's watch it is."""
        return self._watch if self._pid == os.getpid() else None

    def _tell(self, word: bytes) -> None:
        if self._own is not None:
            assert self._own.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                os.write(self._own.stdin.fileno(), word)


def environment_of(pid: int) -> dict[str, str]:
    """Environment with which a process was started; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def _status_of(pid: int) -> list[bytes]:
    """Fields of a process's status, from the third on; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; the fields after it do not.
            return file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return []


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    fields = _status_of(pid)
    return int(fields[1]) if fields else 0


def age_seconds(pid: int) -> float:
    """How long ago a process was started; 0 if it is gone."""
    fields = _status_of(pid)
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else float("inf")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def launcher_of(pid: int, rank_name: str) -> int:
    """The launcher process above a rank; 0 if there is none to be seen."""
    parent = parent_of(pid)
    while parent > 1 and rank_name in environment_of(parent):
        parent = parent_of(parent)
    return parent if parent > 1 else 0


def ranks_below(launcher: int, rank_name: str) -> dict[int, int]:
    """Ranks of the launcher's living children, with their process numbers."""
    children = [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent_of(int(name)) == launcher]
    texts = {child: environment_of(child).get(rank_name, "") for child in children}
    return {int(text): child for child, text in texts.items() if text.isdecimal()}


class _Watch:
    """What the process of a watch does, for process `pid`."""

    def __init__(self, pid: int, rank_name: str, num_local_ranks: int, num_ranks: int) -> None:
        self._pid, self._rank_name, self._num_local_ranks = pid, rank_name, num_local_ranks
        self._launcher = launcher_of(pid, rank_name)
        self._living: dict[int, int] = {}
        self._seen = set[int]()
        self._num_ranks, self._waits = num_ranks, False
        self._mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def run(self) -> None:
        """Until told to stop, or until this rank or another has ended."""
        if self._launcher == 0:
            return
        own_rank = int(environment_of(self._pid)[self._rank_name])
        with contextlib.suppress(OSError):  # taken by what has gone in a moment: then this end is not known as one in order
            self._mark.bind(self._address(own_rank))
        missed_before = False
        while True:
            if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
                word = os.read(sys.stdin.fileno(), 1)
                if word == _ENDS:
                    self._stay()
                if word != _WAITS:
                    return
                self._waits = True
            self._look()
            if own_rank not in self._living:
                return
            missed = self._misses()
            # Twice, as a process has no environment for a moment while it becomes another program.
            if missed and missed_before:
                self._end()
                return
            missed_before = missed

    def _look(self) -> None:
        living = self._living.items()
        self._living = {rank: pid for rank, pid in living if environment_of(pid).get(self._rank_name) == str(rank)}
        if len(self._living) < self._num_local_ranks:
            self._living = ranks_below(self._launcher, self._rank_name)
        self._seen |= self._living.keys()

    def _stay(self) -> None:
        """Keep what the others look for, as long as there are some."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)  # launchers wait until nobody can write any more
        while ranks_below(self._launcher, self._rank_name):
            time.sleep(_STAY_SECONDS)

    def _forgiven(self) -> set[int]:
        """Ranks of this host that have ended, in order, and that this one does not wait for."""
        gone = set() if self._waits else set(range(self._num_ranks)) - self._living.keys()
        return {rank for rank in gone if self._has_mark(rank)}

    def _has_mark(self, rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex(self._address(rank)) == 0

    def _misses(self) -> bool:
        """Whether a rank of this host has ended, not in order or while this one waits."""
        if len(self._living) >= self._num_local_ranks:
            return False
        forgiven = self._forgiven()
        if len(self._living) + len(forgiven) >= self._num_local_ranks:
            return False
        return bool(self._seen - self._living.keys() - forgiven) or age_seconds(self._pid) > _ALL_STARTED_SECONDS

    def _address(self, rank: int) -> str:
        """The names are the host's, and go with the process that has them."""
        return f"\0rannc-start-{self._launcher}-{rank}"

    def _end(self) -> None:
        forgiven = self._forgiven()
        # One that ended before this one looked can be named where all ranks are on this host.
        known = set(range(self._num_ranks)) if self._num_ranks == self._num_local_ranks else self._seen
        gone = sorted(known - self._living.keys() - forgiven)
        num_gone = self._num_local_ranks - len(self._living) - len(forgiven)
        lock = socket.socket(socket.AF_UNIX)
        # The watches of all ranks come to the same end: one speaks, and the others let it, as launchers end all when one rank has ended.
        try:
            lock.bind(f"\0rannc-start-{self._launcher}")
        except OSError:
            time.sleep(2 * _POLL_SECONDS)
        else:
            names = f"rank {', '.join(map(str, gone))}" if gone else f"{num_gone} rank(s)"
            message = (
                f"[rannc] the job has ended because of {names} (host {socket.gethostname()})\n"
                "[rannc]   in     before its first call of a compiled model\n"
                "[rannc]   cause  it ended, and the others cannot start without it; what it printed says why\n"
            )
            os.write(2, message.encode())
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
            limit = time.monotonic() + _TERM_SECONDS
            while environment_of(self._pid) and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS / 4)
        self._stay()


def main() -> None:
    # Ctrl-C is for the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for rank_name, size_name, all_name in VARIABLES:
        size, all_ranks = os.environ.get(size_name, ""), os.environ.get(all_name, "")
        if rank_name in os.environ and size.isdecimal():
            _Watch(int(sys.argv[1]), rank_name, int(size), int(all_ranks) if all_ranks.isdecimal() else 0).run()
            return


if __name__ == "__main__":
    main()
