"""The job's monitor process: hears every rank, and when one fails says so once and ends the others.

In: one TCP connection per rank, lines of JSON. Out: one block of text on stderr, and "end" to every rank.
It is a process of its own, started by rank 0 with the standard library only (see `helper`), because mpirun
kills the surviving ranks within a millisecond of a killed one: nobody inside would be left to speak. Who may
talk to it: `monitor_door` and `monitor_wire`.

Terms: a *report* is one rank's account of a failure; the *root* is the report that explains the others;
*silent* is a rank whose heartbeats have stopped; a rank's *phase memory* is a shared memory file that it
writes its phase into and that outlives it here, on the same host; the *folder* is a private one for files of
the job, which goes with the job.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rannc_backend.runtime.job.monitor_door import Door, Stranger
from rannc_backend.runtime.job.monitor_wire import (
    REPORTS,
    Died,
    Lines,
    Raised,
    Report,
    Silent,
    WaitFailed,
    WireError,
    cookie_of,
    open_memory,
    read_phase,
    required,
)
from rannc_backend.runtime.processes import ProcessMark, send_signal, wait_until_gone
from rannc_backend.settings import hooks

# Time in which reports that explain a first one may still come in, by how likely they are to do so.
_ROOT_WINDOW_SECONDS = 0.05
_SECONDARY_WINDOW_SECONDS = 0.3
_END_SECONDS = 2.0
_LEAD_SECONDS = 0.25
_ALONE_SECONDS = 60.0
_SILENT_SECONDS = 3.0
_NUM_OTHERS_SHOWN = 8
_NUM_TRACES_SHOWN = 2
# Of what a rank has not taken yet; one that is frozen takes nothing.
_MAX_UNSENT_BYTES = 2**24
# A rank that has closed its connection still uses the folder while it takes its groups down.
_FOLDER_SECONDS = 10.0
SIGNS_OF_KILL = "ended without a word: killed (SIGKILL, or out of memory), crashed, or its host is gone"


@dataclass
class RankRecord:
    """What the supervisor knows of one rank."""

    rank: int
    host: str = "?"
    pid: int = 0
    process: ProcessMark | None = None
    connection: socket.socket | None = None
    lines: Lines = field(default_factory=Lines)
    unsent: bytearray = field(default_factory=bytearray)
    memory: mmap.mmap | None = None
    phase: str = "before its first phase"
    num_calls: int = 0
    last_heard: float = field(default_factory=time.monotonic)
    left: bool = False
    note: str = ""

    def current_phase(self) -> str:
        """Its phase at this moment (same host), or at its last heartbeat."""
        return self.phase if self.memory is None else read_phase(self.memory) or self.phase


def choose_root(reports: list[Report], silent: dict[int, float]) -> Report:
    """The report that explains the others: the first of the lowest weight, or a silent rank if only waits
    failed.

    Where several ranks raise the same, it is that of the lowest.

    Args:
        reports: in order of arrival, at least one.
        silent: seconds of silence of the ranks that are silent.
    """
    first = min(reports, key=lambda report: report.weight)
    same = [
        report
        for report in reports
        if isinstance(report, Raised) and isinstance(first, Raised) and report.cause == first.cause
    ]
    root = min(same, key=lambda report: report.rank, default=first)
    if isinstance(root, WaitFailed) and silent:
        rank = min(silent)
        cause = (
            f"no sign of life for {silent[rank]:.0f} s: stopped, swapped out, or its host cannot be reached"
        )
        return Silent(rank=rank, cause=f"{cause}\n(rank {root.rank} waited for it: {root.cause})")
    return root


def diagnosis_text(
    root: Report, rank_records: list[RankRecord], *, oom_kills: int, reports: Sequence[Report] = ()
) -> str:
    """The block that ends the job's output: the cause first, then place and cure, what ranks were doing, and
    tracebacks.

    Args:
        oom_kills: processes that the kernel's out-of-memory killer ended on the failed rank's host since the
        start.
        reports: of all ranks. Those that failed in another way say so, with their own tracebacks.
    """
    rank_record = rank_records[root.rank]
    place = f"rank {root.rank} of {len(rank_records)} (host {rank_record.host}, pid {rank_record.pid})"
    rows = [("cause", root.full_cause(rank_record.host, rank_record.note, oom_kills))]
    rows += [("at", root.location)] if root.location else []
    rows += [("cure", root.cure)] if root.cure else []
    rows += [("in", root.phase or rank_record.current_phase())]
    failed = {
        report.rank: report
        for report in reversed(reports)
        if isinstance(report, Raised) and report.rank != root.rank
    }
    others = [other for other in rank_records if other.rank != root.rank]
    for other in others[:_NUM_OTHERS_SHOWN]:
        report = failed.get(other.rank)
        text = "left" if other.left else other.current_phase()
        rows.append((f"rank {other.rank}", text if report is None else _failed_too(report, root)))
    width = max(len(name) for name, _ in rows)
    lines = [f"[rannc] the job has ended because of {place}"]
    for name, text in rows:
        head, *more = text.splitlines() or [""]
        lines.append(f"[rannc]   {name:<{width}}  {head}")
        lines += [f"[rannc]   {'':<{width}}  {line}" for line in more]
    # A traceback like another one says nothing more.
    different = [report for report in failed.values() if report.cause != root.cause]
    return (
        "\n".join(lines) + "\n" + "".join(report.trace for report in (root, *different[:_NUM_TRACES_SHOWN]))
    )


def _failed_too(report: Report, root: Report) -> str:
    return (
        "failed in the same way"
        if report.cause == root.cause
        else f"failed, too: {(report.cause.splitlines() or [''])[0]}"
    )


class Supervisor:
    """Accepts the ranks' connections, keeps a record of each, and decides.

    Args:
        token: what a connection must show to have.
        bind: address to listen on.
        failed_first: let the failed rank end before the others, for launchers that name the first one to end.
    """

    def __init__(self, *, size: int, token: str, bind: str, failed_first: bool) -> None:
        self._cookie = cookie_of(token)
        self._failed_first = failed_first
        self._rank_records = [RankRecord(rank=rank) for rank in range(size)]
        self._reports: list[Report] = []
        self._decide_at: float | None = None
        self._said_bye = False
        self._host = socket.gethostname()
        self._oom_kills_before = _oom_kills()
        self._selector = selectors.DefaultSelector()
        self._door = Door(self._selector, token=token, bind=bind, num_ranks=size, admit=self._admit)

    @property
    def port(self) -> int:
        return self._door.port

    @property
    def local_processes(self) -> list[ProcessMark]:
        """The ranks' processes that can be seen from here."""
        return [rank_record.process for rank_record in self._rank_records if rank_record.process is not None]

    def run(self) -> None:
        """Serve until all ranks have gone."""
        alone_until = time.monotonic() + _ALONE_SECONDS
        while True:
            self._serve(1.0 if self._decide_at is None else max(0.0, self._decide_at - time.monotonic()))
            some_connected = any(rank_record.connection for rank_record in self._rank_records)
            # Nobody left to hear from, because the launcher has killed the others: nothing to wait for
            # either.
            if self._decide_at is not None and (not some_connected or time.monotonic() >= self._decide_at):
                self._end_job()
                return
            if not some_connected and (
                any(rank_record.pid for rank_record in self._rank_records) or time.monotonic() > alone_until
            ):
                return

    def _serve(self, timeout_seconds: float) -> None:
        """Do what there is to do, ranks first."""
        events = self._selector.select(self._door.wait_seconds(timeout_seconds))
        for key, mask in sorted(events, key=lambda event: not isinstance(event[0].data, RankRecord)):
            if isinstance(key.data, RankRecord):
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ and key.data.connection is not None:
                    self._read(key.data.connection, key.data)
            elif isinstance(key.data, Stranger):
                self._door.read(key.data)
            else:
                self._door.accept()
        self._door.sweep()

    def _admit(
        self, connection: socket.socket, rank: int, messages: list[dict[str, Any]], lines: Lines
    ) -> bool:
        """Give a connection that has shown the token its record; False if there is none for it."""
        hello, *more = messages
        host, pid, start_ticks, space, memory = required(
            hello, "host", "pid", "start_ticks", "space", "memory"
        )
        if (
            hello["type"] != "hello"
            or not 0 < pid < 2**31
            or not 0 <= rank < len(self._rank_records)
            or self._rank_records[rank].pid
        ):
            return False
        rank_record = self._rank_records[rank]
        rank_record.connection, rank_record.lines, rank_record.host, rank_record.pid = (
            connection,
            lines,
            host,
            pid,
        )
        rank_record.last_heard = time.monotonic()
        process = ProcessMark(pid=pid, start_ticks=start_ticks, space=space)
        # A process that cannot be seen from here, or is not the one that it says, is neither read nor ended
        # from here.
        if process.is_living:
            rank_record.process, rank_record.memory = process, open_memory(pid, memory, self._cookie)
        self._selector.register(connection, selectors.EVENT_READ, rank_record)
        for other in self._rank_records:
            if other.left:
                self._send(rank_record, {"type": "left", "rank": other.rank, "num_calls": other.num_calls})
        self._take_all(rank_record, more)
        return True

    def _read(self, connection: socket.socket, rank_record: RankRecord) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(rank_record, SIGNS_OF_KILL)
            return
        rank_record.last_heard = time.monotonic()
        try:
            self._take_all(rank_record, list(rank_record.lines.feed(data)))
        except WireError as error:
            self._lose(rank_record, f"it sent what the job's monitor does not understand: {error}")

    def _lose(self, rank_record: RankRecord, cause: str) -> None:
        """A rank's connection has ended."""
        if rank_record.connection is None:
            return
        self._selector.unregister(rank_record.connection)
        rank_record.connection.close()
        rank_record.connection = None
        reported = any(report.rank == rank_record.rank for report in self._reports)
        if not (self._said_bye and rank_record.left) and not reported:
            self._add(Died(rank=rank_record.rank, cause=cause, phase=rank_record.current_phase()))

    def _take_all(self, rank_record: RankRecord, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            try:
                self._take(rank_record, message)
            except WireError as error:
                self._lose(rank_record, f"it sent what the job's monitor does not understand: {error}")
                return

    def _take(self, rank_record: RankRecord, message: dict[str, Any]) -> None:
        rank_record.phase = message.get("phase", rank_record.phase)
        rank_record.num_calls = message.get("num_calls", rank_record.num_calls)
        kind = message["type"]
        if kind == "fail":
            rank = message.get("rank", rank_record.rank)
            what, cause, phase = required(message, "kind", "cause", "phase")
            if not 0 <= rank < len(self._rank_records) or what not in REPORTS:
                raise WireError(f"rank {rank}, {what[:40]!r}")
            phase = phase if rank == rank_record.rank else self._rank_records[rank].current_phase()
            more = {name: message[name] for name in ("location", "code", "cure", "trace") if name in message}
            self._add(REPORTS[what](rank=rank, cause=cause, phase=phase, **more))
        elif kind == "leave":
            rank_record.left, rank_record.note = True, message.get("note", "")
            self._send_all({"type": "left", "rank": rank_record.rank, "num_calls": rank_record.num_calls})
            if all(other.left for other in self._rank_records):
                self._said_bye = True
                self._send_all({"type": "bye"})
        elif kind == "survey":
            self._send(
                rank_record,
                {"type": "states", "states": [self._state(other) for other in self._rank_records]},
            )
        elif kind != "beat":
            raise WireError(f"a message {kind[:40]!r}")

    def _state(self, rank_record: RankRecord) -> dict[str, Any]:
        return {
            "rank": rank_record.rank,
            "host": rank_record.host,
            "phase": rank_record.current_phase(),
            "num_calls": rank_record.num_calls,
            "silent_seconds": time.monotonic() - rank_record.last_heard,
            "left": rank_record.left,
        }

    def _add(self, report: Report) -> None:
        self._reports.append(report)
        window = _SECONDARY_WINDOW_SECONDS if report.weight else _ROOT_WINDOW_SECONDS
        at = time.monotonic() + window
        self._decide_at = at if self._decide_at is None else min(at, self._decide_at)

    def _end_job(self) -> None:
        self._door.close()
        now = time.monotonic()
        silences = {
            rank_record.rank: now - rank_record.last_heard
            for rank_record in self._rank_records
            if rank_record.connection and not rank_record.left
        }
        silent = {rank: seconds for rank, seconds in silences.items() if seconds > _SILENT_SECONDS}
        root = choose_root(self._reports, silent)
        local = self._rank_records[root.rank].host == self._host
        oom_kills = _oom_kills() - self._oom_kills_before if local else 0
        text = diagnosis_text(root, self._rank_records, oom_kills=oom_kills, reports=self._reports)
        try:
            os.write(2, text.encode())
        except OSError:
            pass  # nobody reads our stderr any more; the ranks must still end
        first = self._rank_records[root.rank]
        end = {"type": "end", "code": root.code}
        if first.rank in silent:
            self._kill(first)
        if self._failed_first:
            self._send(first, end)
            self._wait_for_ends([first])
            time.sleep(_LEAD_SECONDS)
        self._send_all(end)
        self._wait_for_ends(self._rank_records)

    def _wait_for_ends(self, rank_records: list[RankRecord]) -> None:
        until = time.monotonic() + _END_SECONDS
        while any(rank_record.connection for rank_record in rank_records) and time.monotonic() < until:
            self._serve(0.05)
        for rank_record in rank_records:
            self._kill(rank_record)

    def _kill(self, rank_record: RankRecord) -> None:
        """End a process that cannot follow "end": its connection is open, and it is proved to be the one that
        said hello.
        """
        if rank_record.connection is not None and rank_record.process is not None:
            send_signal(rank_record.process, signal.SIGKILL)

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank_record in self._rank_records:
            self._send(rank_record, message)

    def _send(self, rank_record: RankRecord, message: dict[str, Any]) -> None:
        if rank_record.connection is None:
            return
        rank_record.unsent += json.dumps(message).encode() + b"\n"
        self._flush(rank_record)

    def _flush(self, rank_record: RankRecord) -> None:
        """Send what a rank takes now; the rest when it takes more, as a part of a message would spoil the
        next one.
        """
        if rank_record.connection is None:
            return
        try:
            while rank_record.unsent:
                del rank_record.unsent[: rank_record.connection.send(rank_record.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            rank_record.unsent.clear()  # its end of connection is read, and judged, in its turn
        if len(rank_record.unsent) > _MAX_UNSENT_BYTES:
            self._lose(
                rank_record,
                f"it has not taken {len(rank_record.unsent)} bytes of messages: stopped, or its host cannot "
                "be reached",
            )
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank_record.unsent else 0)
        if self._selector.get_key(rank_record.connection).events != events:
            self._selector.modify(rank_record.connection, events, rank_record)


def _oom_kills() -> int:
    """Processes ended by the kernel's out-of-memory killer on this host since it booted; 0 if unknown."""
    try:
        with open("/proc/vmstat", "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(b"oom_kill "))
    except OSError:
        return 0


def make_folder(parent: str) -> str:
    """A new folder that nobody else can read or has made; "" if there can be none."""
    path = os.path.join(parent, f"rannc_{secrets.token_hex(16)}")
    try:
        os.mkdir(path, 0o700)
    except OSError:
        return ""
    return path


def main() -> None:
    options = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher's signals are for the ranks; this process ends when they have gone.
        hooks.handle_signal("helper's signals", number, signal.SIG_IGN)
    parent = options.pop("folder_in")
    supervisor = Supervisor(**options)
    folder = make_folder(parent) if parent else ""
    sys.stdout.write(json.dumps([supervisor.port, folder]) + "\n")
    sys.stdout.close()
    try:
        supervisor.run()
    finally:
        if folder:
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # launchers wait until nobody can write any more
            wait_until_gone(supervisor.local_processes, _FOLDER_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
