"""Which process is meant: a number alone is reused by the system, and means another process in another
container.

In: process numbers. Out: `ProcessMark`s, and signals to exactly those processes. Standard library only: the
job's helper processes, which are plain scripts, use this file too.

Terms: a *mark* is a process number with the time of its start and its *space*, the running system and
numbering of processes in which the number counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NUMBERING = "/proc/self/ns/pid"
_START_FIELD, _PARENT_FIELD, _STATE_FIELD = 19, 1, 0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class ProcessMark:
    """One process, for as long as the system runs.

    Attributes:
        start_ticks: when it was started, in the system's ticks since its start; 0 if unknown.
        space: see `space_of_numbers`; "" if unknown.
    """

    pid: int
    start_ticks: int
    space: str

    @property
    def is_living(self) -> bool:
        """Whether this process, and no other by its number, runs here as a process of this user."""
        if not self.space or self.space != space_of_numbers() or self.start_ticks <= 0:
            return False
        fields = status_of(self.pid)
        return (
            bool(fields)
            and int(fields[_START_FIELD]) == self.start_ticks
            and fields[_STATE_FIELD] != b"Z"
            and is_ours(self.pid)
        )


def space_of_numbers() -> str:
    """The running system and the numbering of processes of this process; "" where the system does not
    tell.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat(_NUMBERING).st_ino}"
    except OSError:
        return ""


def mark_of(pid: int) -> ProcessMark:
    """The mark of a process that runs now; one that fits no process if it does not."""
    fields = status_of(pid)
    return ProcessMark(
        pid=pid, start_ticks=int(fields[_START_FIELD]) if fields else 0, space=space_of_numbers()
    )


def send_signal(mark: ProcessMark, number: int) -> bool:
    """Send a signal to a process if it can be proved to be the marked one; returns whether it was sent."""
    try:
        if not hasattr(os, "pidfd_open"):
            if mark.is_living:
                os.kill(mark.pid, number)
                return True
            return False
        # Held, the process cannot be replaced by another one between the look and the signal.
        descriptor = os.pidfd_open(mark.pid)
        try:
            if not mark.is_living:
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        finally:
            os.close(descriptor)
    except (OSError, OverflowError):
        return False


def wait_until_gone(marks: list[ProcessMark], limit_seconds: float) -> None:
    """Returns when none of these processes runs here any more, or at the limit."""
    until = time.monotonic() + limit_seconds
    while any(mark.is_living for mark in marks) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def status_of(pid: int) -> list[bytes]:
    """Fields of a process's status, from the third on; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; the fields after it do not.
            return file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return []


def all_processes() -> list[int]:
    """Numbers of all processes that are to be seen here."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    fields = status_of(pid)
    return int(fields[_PARENT_FIELD]) if fields else 0


def age_seconds(pid: int) -> float:
    """How long ago a process was started; 0 if it is gone."""
    fields = status_of(pid)
    started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK") if fields else float("inf")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def environment_of(pid: int) -> dict[str, str]:
    """Environment with which a process was started; empty if it is gone or another user's."""
    items = _text_of(pid, "environ").split("\0")
    return dict(item.split("=", 1) for item in items if "=" in item)


def arguments_of(pid: int) -> list[str]:
    """What a process was started with, or says that it was; empty if it is gone."""
    return _text_of(pid, "cmdline").split("\0")[:-1]


def name_of(pid: int) -> str:
    """The name that a process of this user has given itself; "" if it is gone or another user's."""
    return _text_of(pid, "comm").strip() if is_ours(pid) else ""


def set_name(name: str) -> None:
    """Give this process a name that others see, of 15 bytes at most."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def _text_of(pid: int, what: str) -> str:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def is_ours(pid: int) -> bool:
    """Whether a process runs as this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
