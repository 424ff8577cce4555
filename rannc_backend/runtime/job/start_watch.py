"""Watches the other ranks of this host from the moment in which this one looks the backend up until the job
stands.

In: the environment of a rank. Out: nothing, or, when another rank of this host has ended before the job
stood, or the limit of the start has passed: one message, and the end of this rank. A process of its own, with
the standard library only (see `helper`), because MPI_Init holds the interpreter's lock for as long as it
waits, and no rank can hear of another before MPI stands.

Terms: the *launcher process* is the nearest ancestor whose environment has no rank (mpirun's local daemon,
torchrun's agent); its children with a rank are the ranks of this host. A rank ends *in order* without an
error and with exit code 0: the others go on then, as they may be about to end too, until they wait for it.
They know by its watch, which stays until they have ended. A rank is *missing* at the limit if it lives and is
stopped, or neither waits, which the name of its watch says, nor has met the job's monitor. Watches find each
other in /proc, by their arguments and their owner: there is no name that another user could take before them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from rannc_backend.runtime.job import helper
from rannc_backend.runtime.processes import (
    age_seconds,
    all_processes,
    arguments_of,
    environment_of,
    is_ours,
    mark_of,
    name_of,
    parent_of,
    send_signal,
    set_name,
    status_of,
)
from rannc_backend.settings import hooks

# Rank, number of ranks on this host and in all, by launcher. Where the second is not there, only the limit is
# watched.
VARIABLES = (
    ("PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("SLURM_PROCID", "", "SLURM_STEP_NUM_TASKS"),
)
_POLL_SECONDS = 0.2
# A launcher starts its ranks one by one: who was never seen is missed only when this rank is as old as this.
_ALL_STARTED_SECONDS = 3.0
_TERM_SECONDS = 1.0
_STAY_SECONDS = 1.0

# The rank's own limits come first, as their errors can be caught.
_GRACE_SECONDS = 1.0
# A rank whose start has failed may have to wait in the end of MPI for the rank that is missing.
_END_SECONDS = 3.0

# What a rank tells its watch, a line each; the first with the limit of the start, in seconds.
_WAITS, _STANDS, _MISSES_SOME, _ENDS, _ENDS_BADLY = b"w", b"s", b"m", b"e", b"x"
# Names of the watch's process, which other watches look for: 15 bytes at most.
_NAME, _NAME_WAITS = "rannc-watch", "rannc-waits"
_NAME_WANTS, _NAME_SPEAKS = "rannc-wants", "rannc-speaks"
_SCRIPT = os.path.basename(helper.__file__)
# In which watches that come to the same end at the same time see that of each other.
_WORD_SECONDS = 0.05
# What a rank that has met the job's monitor has open; see `monitor`.
_STANDS_BY = "/memfd:rannc-phase"


class StartWatch:
    """The watch of this process: from `begin` to the end of its use as a context, which is around the start.

    Args:
        exit_code: the code of the SystemExit that ends the interpreter, asked at exit.
    """

    def __init__(self, exit_code: Callable[[], int] = lambda: 0) -> None:
        self._exit_code = exit_code
        self._watch: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._limit_seconds = 0.0
        self._is_missing_some = False

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start the watch, where the environment tells of other ranks on this host. Once per process."""
        found = find_variables(environ)
        if found is None or self._pid == os.getpid() or not os.path.isdir("/proc/self"):
            return
        launcher = mark_of(launcher_of(os.getpid(), found[0]))
        command = helper.command_of(
            "start_watch", str(os.getpid()), environ[found[0]], f"{launcher.pid}:{launcher.start_ticks}"
        )
        self._watch, self._pid = (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL),
            os.getpid(),
        )
        hooks.at_exit("start watch", self._at_exit)

    def limit(self, seconds: float) -> StartWatch:
        """The same, with the longest time that the context may take."""
        self._limit_seconds = seconds
        return self

    def __enter__(self) -> StartWatch:
        self._send(_WAITS + f" {self._limit_seconds}".encode())
        return self

    def __exit__(self, *_: object) -> None:
        self._send(_MISSES_SOME if self._is_missing_some else _STANDS)
        if self._own is not None and not self._is_missing_some:
            self._own.wait()
            self._watch = None

    def note_missing(self) -> str:
        """The start fails because others have not come, and MPI may not end without them. Which ones, in
        words; "" if unknown.
        """
        self._is_missing_some = True
        found = find_variables(os.environ)
        return (
            ""
            if found is None or self._own is None
            else missing_text(missing_ranks(launcher_of(self._pid, found[0]), found[0]))
        )

    def stop(self) -> None:
        """This rank has failed and tells it itself: what becomes of the others does not matter to it."""
        if not self._is_missing_some:
            self._send(_STANDS)

    def _at_exit(self) -> None:
        if self._is_missing_some:
            self._send(_ENDS_BADLY)
        elif getattr(sys, "last_type", None) is None and not self._exit_code():
            self._send(_ENDS)

    @property
    def _own(self) -> subprocess.Popen[bytes] | None:
        """None also in a forked child, whose parent's watch it is."""
        return self._watch if self._pid == os.getpid() else None

    def _send(self, word: bytes) -> None:
        if self._own is not None:
            assert self._own.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                os.write(self._own.stdin.fileno(), word + b"\n")


def find_variables(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Name of the variable with the rank, ranks on this host (0: unknown) and in all; None in a job of one
    process.
    """
    # torchrun under mpirun leaves the outer rank in the environment.
    order = VARIABLES if "TORCHELASTIC_RUN_ID" not in environ else VARIABLES[2:]
    for rank_name, local_name, all_name in order:
        texts = environ.get(local_name, ""), environ.get(all_name, "")
        local, in_all = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in texts)
        if environ.get(rank_name, "").isdecimal() and max(local, in_all) > 1:
            return rank_name, local, in_all
    return None


def launcher_of(pid: int, rank_name: str) -> int:
    """The launcher process above a rank; 0 if there is none to be seen."""
    parent = parent_of(pid)
    while parent > 1 and rank_name in environment_of(parent):
        parent = parent_of(parent)
    return parent if parent > 1 else 0


def ranks_below(launcher: int, rank_name: str) -> dict[int, int]:
    """Ranks of the launcher's living children, with their process numbers."""
    children = [process for process in all_processes() if parent_of(process) == launcher]
    texts = {child: environment_of(child).get(rank_name, "") for child in children}
    return {int(text): child for child, text in texts.items() if text.isdecimal()}


def watches_of(launcher: str) -> dict[int, int]:
    """Process numbers of the watches that run here as this user, by rank; ``launcher``: as their arguments
    name it.
    """
    found = {}
    for process in all_processes():
        script, *arguments = arguments_of(process)[3:] or [""]
        # Anybody can give a process such arguments, but not make it one of this user.
        if (
            os.path.basename(script) == _SCRIPT
            and arguments[:1] + arguments[3:] == ["start_watch", launcher]
            and is_ours(process)
        ):
            found[int(arguments[2]) if arguments[2].isdecimal() else -1] = process
    return found


def missing_ranks(launcher: int, rank_name: str) -> dict[int, tuple[int, str]]:
    """Ranks below a launcher (0: unknown) that live and have not come to the start: process number, and what
    they do.
    """
    ranks = ranks_below(launcher, rank_name) if launcher else {}
    waiting = {
        parent_of(process)
        for process in all_processes()
        if name_of(process) in (_NAME_WAITS, _NAME_WANTS, _NAME_SPEAKS)
    }
    missing = {}
    for rank, process in ranks.items():
        if status_of(process)[:1] in ([b"T"], [b"t"]):
            missing[rank] = process, "is stopped"
        elif process not in waiting and not _has_met_the_monitor(process):
            missing[rank] = process, "has not called a compiled model"
    return missing


def missing_text(missing: Mapping[int, tuple[int, str]]) -> str:
    """As "rank 1 is stopped, rank 3 has not called a compiled model"."""
    return ", ".join(f"rank {rank} {missing[rank][1]}" for rank in sorted(missing))


def _has_met_the_monitor(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(_STANDS_BY):
                    return True
    return False


class _Watch:
    """What the process of a watch does, for process `pid`."""

    def __init__(self, pid: int, launcher: str, rank_name: str, num_local_ranks: int, num_ranks: int) -> None:
        self._pid, self._rank_name, self._num_local_ranks = pid, rank_name, num_local_ranks
        self._launcher, self._launcher_text, self._own_rank = launcher_of(pid, rank_name), launcher, -1
        # Its child now, and so the process that is meant; one that has the number later is another one.
        self._process = mark_of(pid if os.getppid() == pid else 0)
        self._living: dict[int, int] = {}
        self._seen = set[int]()
        self._num_ranks, self._waits, self._misses_some = num_ranks, False, False
        self._unread = b""
        self._limit_seconds, self._end_at = 0.0, float("inf")

    def run(self) -> None:
        """Until told to stop, or until this rank or another has ended, or the limit has passed."""
        own_rank = self._own_rank = int(os.environ[self._rank_name])
        missed_before = False
        while self._hears():
            self._look(own_rank)
            if os.getppid() != self._pid:
                break
            if time.monotonic() > self._end_at:
                self._end(self._late_text(), self._missing())
                return
            missed = not self._misses_some and self._misses()
            # Twice, as a process has no environment for a moment while it becomes another program.
            if missed and missed_before:
                self._end(self._gone_text(), {})
                return
            missed_before = missed
        # It has given up by itself. A rank that is stopped would follow no launcher's SIGTERM.
        missing = self._missing() if self._misses_some else {}
        if missing:
            self._end(self._late_text(), missing)

    def _hears(self) -> bool:
        """Do what the rank says; False when there is nothing more to watch."""
        if not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            return True
        data = os.read(sys.stdin.fileno(), 4096)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == _WAITS:
                self._waits, self._limit_seconds = True, float(number)
                self._end_at = time.monotonic() + self._limit_seconds + _GRACE_SECONDS
                set_name(_NAME_WAITS)
            elif word == _MISSES_SOME:
                self._misses_some, self._end_at = True, float("inf")
            elif word == _ENDS_BADLY:
                self._end_at = time.monotonic() + _END_SECONDS
            else:
                if word == _ENDS and self._launcher:
                    self._stay()
                return False
        return bool(data)

    def _look(self, own_rank: int) -> None:
        living = self._living.items()
        self._living = {
            rank: pid for rank, pid in living if environment_of(pid).get(self._rank_name) == str(rank)
        }
        if not self._living or len(self._living) < self._num_local_ranks:
            others = (
                ranks_below(self._launcher, self._rank_name)
                if self._num_local_ranks and self._launcher
                else {}
            )
            self._living = {own_rank: self._pid} | others
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
        return gone & watches_of(self._launcher_text).keys() if gone else gone

    def _misses(self) -> bool:
        """Whether a rank of this host has ended, not in order or while this one waits."""
        if not self._launcher or len(self._living) >= self._num_local_ranks:
            return False
        forgiven = self._forgiven()
        if len(self._living) + len(forgiven) >= self._num_local_ranks:
            return False
        return (
            bool(self._seen - self._living.keys() - forgiven) or age_seconds(self._pid) > _ALL_STARTED_SECONDS
        )

    def _takes_the_word(self) -> bool:
        """Whether this watch tells what has happened: the first that wants to, or the lowest of those that do
        at the same time.
        """
        if not self._launcher:
            return True
        set_name(_NAME_WANTS)
        time.sleep(_WORD_SECONDS)
        names = {rank: name_of(process) for rank, process in watches_of(self._launcher_text).items()}
        wanting = [rank for rank, name in names.items() if name == _NAME_WANTS]
        if _NAME_SPEAKS in names.values() or min(wanting, default=self._own_rank) != self._own_rank:
            return False
        set_name(_NAME_SPEAKS)
        return True

    def _missing(self) -> dict[int, tuple[int, str]]:
        return missing_ranks(self._launcher, self._rank_name)

    def _gone_text(self) -> str:
        forgiven = self._forgiven()
        # One that ended before this one looked can be named where all ranks are on this host.
        known = set(range(self._num_ranks)) if self._num_ranks == self._num_local_ranks else self._seen
        gone = sorted(known - self._living.keys() - forgiven)
        num_gone = self._num_local_ranks - len(self._living) - len(forgiven)
        names = f"rank {', '.join(map(str, gone))}" if gone else f"{num_gone} rank(s)"
        return _block(names, "it ended, and the others cannot start without it; what it printed says why")

    def _late_text(self) -> str:
        missing = self._missing()
        if missing:
            names, cause = f"rank {', '.join(map(str, sorted(missing)))}", missing_text(missing)
        elif self._num_ranks != self._num_local_ranks or not self._launcher:
            names, cause = "ranks of other hosts", "they have not come, and all ranks of this host wait"
        else:
            names, cause = (
                "its start",
                "all ranks wait, and do not meet: MPI or the network does not connect them",
            )
        limit = f"the start may take {self._limit_seconds:g} s (RANNC_START_TIMEOUT_SECONDS)"
        return _block(names, f"{cause}; {limit}")

    def _end(self, message: str, missing: Mapping[int, tuple[int, str]]) -> None:
        """Say it once, and end this rank and those that are ``missing``."""
        # The watches of all ranks come to the same end: one speaks, and the others let it, as launchers end
        # all when one rank has ended.
        if self._takes_the_word():
            os.write(2, message.encode())
            for rank, (pid, _) in missing.items():
                self._kill(rank, pid)
        else:
            time.sleep(2 * _POLL_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not environment_of(self._pid):
                break
            send_signal(self._process, number)
            limit = time.monotonic() + _TERM_SECONDS
            while environment_of(self._pid) and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS / 4)
        if self._launcher:
            self._stay()

    def _kill(self, rank: int, pid: int) -> None:
        """End a process that is stopped or busy, if it still is that rank of this job."""
        mark = mark_of(pid)
        if (
            environment_of(pid).get(self._rank_name) == str(rank)
            and launcher_of(pid, self._rank_name) == self._launcher
        ):
            send_signal(mark, signal.SIGKILL)


def _block(names: str, cause: str) -> str:
    return (
        f"[rannc] the job has ended because of {names} (host {socket.gethostname()})\n"
        "[rannc]   in     before its first call of a compiled model\n"
        f"[rannc]   cause  {cause}\n"
    )


def main() -> None:
    # Ctrl-C is for the ranks.
    hooks.handle_signal("helper's signals", signal.SIGINT, signal.SIG_IGN)
    set_name(_NAME)
    found = find_variables(os.environ)
    if found is not None:
        _Watch(int(sys.argv[2]), sys.argv[4], *found).run()
