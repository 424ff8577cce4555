"""The job's monitor process: hears every rank, and when one fails says so once and ends the others.

In: one TCP connection per rank, lines of JSON. Out: one block of text on stderr, and "end" to every rank.
It is a process of its own, started by rank 0 as a plain script (`python -I -S monitor_hub.py`, standard library only),
because mpirun kills the surviving ranks within a millisecond of a killed one: nobody inside would be left to speak.

Terms: a *report* is one rank's account of a failure; the *root* is the report that explains the others; *silent* is a
rank whose heartbeats have stopped; a rank's *phase memory* is a shared memory file that it writes its phase into and
that outlives it here, on the same host.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

PHASE_BYTES = 512
COOKIE_BYTES = 16
# Time in which reports that explain a first one may still come in, by how likely they are to do so.
_ROOT_WINDOW_SECONDS = 0.05
_SECONDARY_WINDOW_SECONDS = 0.3
_END_SECONDS = 2.0
_LEAD_SECONDS = 0.25
_ALONE_SECONDS = 60.0
_SILENT_SECONDS = 3.0
_NUM_OTHERS_SHOWN = 8
# Lower explains higher: a rank that died or raised explains one that missed it, and both explain a broken connection.
_WEIGHTS = {"left": 1, "communication": 2}
SIGNS_OF_KILL = "ended without a word: killed (SIGKILL, or out of memory), crashed, or its host is gone"


@dataclass(frozen=True)
class Report:
    """One rank's account of a failure.

    Attributes:
        kind: "died", "exception", "exit", "interrupt", "signal", "left" (a rank left while this one needs it) or
            "communication".
        phase: what the failed rank was doing.
        location: place in the user's source; "" if unknown.
        code: exit code of the job.
    """

    rank: int
    kind: str
    cause: str
    phase: str = ""
    location: str = ""
    code: int = 1


@dataclass
class Seat:
    """What the hub knows of one rank."""

    rank: int
    host: str = "?"
    pid: int = 0
    connection: socket.socket | None = None
    unread: bytes = b""
    memory: mmap.mmap | None = None
    phase: str = "before its first phase"
    num_calls: int = 0
    last_heard: float = field(default_factory=time.monotonic)
    left: bool = False
    note: str = ""

    def current_phase(self) -> str:
        """Its phase at this moment (same host), or at its last heartbeat."""
        return self.phase if self.memory is None else read_phase(self.memory) or self.phase


def write_phase(memory: mmap.mmap, text: str) -> None:
    """Put `text` into a phase memory, in one copy."""
    data = text.encode()[:255]
    memory[COOKIE_BYTES : COOKIE_BYTES + 1 + len(data)] = bytes((len(data),)) + data


def read_phase(memory: mmap.mmap) -> str:
    """The text that `write_phase` put there."""
    start = COOKIE_BYTES + 1
    return memory[start : start + memory[COOKIE_BYTES]].decode(errors="replace")


def choose_root(reports: list[Report], silent: dict[int, float]) -> Report:
    """The report that explains the others: the first of the lowest weight, or a silent rank if only waits failed.

    Args:
        reports: in order of arrival, at least one.
        silent: seconds of silence of the ranks that are silent.
    """
    root = min(reports, key=lambda report: _WEIGHTS.get(report.kind, 0))
    if root.kind == "communication" and silent:
        rank = min(silent)
        cause = f"no sign of life for {silent[rank]:.0f} s: stopped, swapped out, or its host cannot be reached"
        return Report(rank=rank, kind="silent", cause=f"{cause}\n(rank {root.rank} waited for it: {root.cause})")
    return root


def verdict_text(root: Report, seats: list[Seat], *, oom_kills: int) -> str:
    """The block that ends the job's output.

    Args:
        oom_kills: processes that the kernel's out-of-memory killer ended on the failed rank's host since the start.
    """
    seat = seats[root.rank]
    cause = root.cause
    if root.kind == "died" and oom_kills:
        cause += f"\nThe kernel's out-of-memory killer ended {oom_kills} process(es) on {seat.host} in this time."
    if root.kind == "left" and seat.note:
        cause += f"\nBefore, it had: {seat.note}"
    place = f"rank {root.rank} of {len(seats)} (host {seat.host}, pid {seat.pid})"
    rows = [("in", root.phase or seat.current_phase()), ("cause", cause)]
    if root.location:
        rows.append(("at", root.location))
    others = [other for other in seats if other.rank != root.rank]
    rows += [(f"rank {other.rank}", "left" if other.left else other.current_phase()) for other in others[:_NUM_OTHERS_SHOWN]]
    width = max(len(name) for name, _ in rows)
    lines = [f"[rannc] the job has ended because of {place}"]
    for name, text in rows:
        head, *more = text.splitlines() or [""]
        lines.append(f"[rannc]   {name:<{width}}  {head}")
        lines += [f"[rannc]   {'':<{width}}  {line}" for line in more]
    return "\n".join(lines) + "\n"


class Hub:
    """Accepts the ranks' connections, keeps a seat for each, and decides.

    Args:
        token: what a connection must show.
        bind: address to listen on; "" for all.
        failed_first: let the failed rank end before the others, for launchers that name the first one to end.
    """

    def __init__(self, *, size: int, token: str, bind: str, failed_first: bool) -> None:
        self._token = token
        self._failed_first = failed_first
        self._seats = [Seat(rank=rank) for rank in range(size)]
        self._reports: list[Report] = []
        self._decide_at: float | None = None
        self._said_bye = False
        self._host = socket.gethostname()
        self._oom_kills_before = _oom_kills()
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((bind, 0), backlog=max(size, 128))
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._num_strangers = 0

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def run(self) -> None:
        """Serve until all ranks have gone."""
        alone_until = time.monotonic() + _ALONE_SECONDS
        while True:
            timeout = 1.0 if self._decide_at is None else max(0.0, self._decide_at - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
            some_connected = any(seat.connection for seat in self._seats)
            # Nobody left to hear from, because the launcher has killed the others: nothing to wait for either.
            if self._decide_at is not None and (not some_connected or time.monotonic() >= self._decide_at):
                self._end_job()
                return
            if not some_connected and (any(seat.pid for seat in self._seats) or time.monotonic() > alone_until):
                return

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        # Until its hello has been checked, a connection may not make us wait.
        connection.settimeout(5.0)
        try:
            hello = _read_hello(connection)
        except (OSError, ValueError):
            hello = {}
        seat = self._seat_of(hello)
        if seat is None:
            connection.close()
            return
        connection.setblocking(False)
        seat.connection, seat.host, seat.pid = connection, hello["host"], hello["pid"]
        seat.last_heard = time.monotonic()
        if seat.host == self._host:
            seat.memory = _open_memory(hello["pid"], hello["memory"], self._token)
        self._selector.register(connection, selectors.EVENT_READ, seat)
        for other in self._seats:
            if other.left:
                self._send(seat, {"type": "left", "rank": other.rank, "num_calls": other.num_calls})

    def _seat_of(self, hello: dict[str, Any]) -> Seat | None:
        rank = hello.get("rank")
        if hello.get("token") != self._token or not isinstance(rank, int) or not 0 <= rank < len(self._seats):
            return None
        return self._seats[rank] if self._seats[rank].pid == 0 else None

    def _read(self, connection: socket.socket, seat: Seat) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            seat.connection = None
            reported = any(report.rank == seat.rank for report in self._reports)
            if not (self._said_bye and seat.left) and not reported:
                self._add(Report(rank=seat.rank, kind="died", cause=SIGNS_OF_KILL, phase=seat.current_phase()))
            return
        seat.last_heard = time.monotonic()
        *lines, seat.unread = (seat.unread + data).split(b"\n")
        for line in lines:
            self._take(seat, json.loads(line))

    def _take(self, seat: Seat, message: dict[str, Any]) -> None:
        seat.phase = message.get("phase", seat.phase)
        seat.num_calls = message.get("num_calls", seat.num_calls)
        kind = message["type"]
        if kind == "fail":
            rank = message.get("rank", seat.rank)
            phase = message["phase"] if rank == seat.rank else self._seats[rank].current_phase()
            cause, location, code = message["cause"], message.get("location", ""), message.get("code", 1)
            self._add(Report(rank=rank, kind=message["kind"], cause=cause, phase=phase, location=location, code=code))
        elif kind == "leave":
            seat.left, seat.note = True, message.get("note", "")
            self._send_all({"type": "left", "rank": seat.rank, "num_calls": seat.num_calls})
            if all(other.left for other in self._seats):
                self._said_bye = True
                self._send_all({"type": "bye"})
        elif kind == "survey":
            self._send(seat, {"type": "states", "states": [self._state(other) for other in self._seats]})

    def _state(self, seat: Seat) -> dict[str, Any]:
        return {
            "rank": seat.rank,
            "host": seat.host,
            "phase": seat.current_phase(),
            "num_calls": seat.num_calls,
            "silent_seconds": time.monotonic() - seat.last_heard,
            "left": seat.left,
        }

    def _add(self, report: Report) -> None:
        self._reports.append(report)
        window = _SECONDARY_WINDOW_SECONDS if report.kind in _WEIGHTS else _ROOT_WINDOW_SECONDS
        at = time.monotonic() + window
        self._decide_at = at if self._decide_at is None else min(at, self._decide_at)

    def _end_job(self) -> None:
        now = time.monotonic()
        silences = {seat.rank: now - seat.last_heard for seat in self._seats if seat.connection and not seat.left}
        silent = {rank: seconds for rank, seconds in silences.items() if seconds > _SILENT_SECONDS}
        root = choose_root(self._reports, silent)
        local = self._seats[root.rank].host == self._host
        oom_kills = _oom_kills() - self._oom_kills_before if local else 0
        text = verdict_text(root, self._seats, oom_kills=oom_kills)
        try:
            os.write(2, text.encode())
        except OSError:
            pass  # nobody reads our stderr any more; the ranks must still end
        first = self._seats[root.rank]
        end = {"type": "end", "code": root.code}
        if first.rank in silent:
            self._kill(first)
        if self._failed_first:
            self._send(first, end)
            self._wait_for_ends([first])
            time.sleep(_LEAD_SECONDS)
        self._send_all(end)
        self._wait_for_ends(self._seats)

    def _wait_for_ends(self, seats: list[Seat]) -> None:
        until = time.monotonic() + _END_SECONDS
        while any(seat.connection for seat in seats) and time.monotonic() < until:
            for key, _ in self._selector.select(0.05):
                if isinstance(key.data, Seat):
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        for seat in seats:
            self._kill(seat)

    def _kill(self, seat: Seat) -> None:
        """End a process that cannot follow "end". Its open connection shows that the pid is still its own."""
        if seat.connection is not None and seat.host == self._host:
            try:
                os.kill(seat.pid, signal.SIGKILL)
            except OSError:
                pass

    def _send_all(self, message: dict[str, Any]) -> None:
        for seat in self._seats:
            self._send(seat, message)

    def _send(self, seat: Seat, message: dict[str, Any]) -> None:
        if seat.connection is None:
            return
        try:
            seat.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # its end of connection is read, and judged, in its turn


def _read_hello(connection: socket.socket) -> dict[str, Any]:
    """The first line of a connection. Read by single bytes, so that nothing of the next line is lost."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 4096:
        byte = connection.recv(1)
        if not byte:
            raise ValueError("connection ended before its hello")
        line += byte
    hello = json.loads(line)
    if not isinstance(hello, dict):
        raise ValueError("hello is not an object")
    return hello


def _open_memory(pid: int, descriptor: int, token: str) -> mmap.mmap | None:
    """Map the phase memory of a process of this host; None if it cannot be reached (another container)."""
    if descriptor < 0:
        return None
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            memory = mmap.mmap(file.fileno(), PHASE_BYTES, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    return memory if memory[:COOKIE_BYTES] == token.encode()[:COOKIE_BYTES] else None


def _oom_kills() -> int:
    """Processes ended by the kernel's out-of-memory killer on this host since it booted; 0 if unknown."""
    try:
        with open("/proc/vmstat", "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(b"oom_kill "))
    except OSError:
        return 0


def main() -> None:
    options = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher's signals are for the ranks; this process ends when they have gone.
        signal.signal(number, signal.SIG_IGN)
    hub = Hub(**options)
    sys.stdout.write(f"{hub.port}\n")
    sys.stdout.close()
    hub.run()


if __name__ == "__main__":
    main()
