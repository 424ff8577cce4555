"""The supervisor's judgement and its conversation with the ranks, over real sockets, in this process."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rannc_backend.runtime.job import monitor_wire
from rannc_backend.runtime.job import supervisor as supervisor_module
from rannc_backend.runtime.job.monitor import LinkMonitor
from rannc_backend.runtime.job.monitor_wire import REPORTS, Died, Raised, Report, Silent, read_phase
from rannc_backend.runtime.job.supervisor import RankRecord, Supervisor, choose_root, diagnosis_text
from rannc_backend.runtime.processes import ProcessMark, mark_of

TOKEN = monitor_wire.new_token()
TYPES = {**REPORTS, "died": Died, "silent": Silent}


def report(rank: int, kind: str) -> Report:
    return TYPES[kind](rank=rank, cause=f"cause of {rank}", phase=f"phase {rank}")


@pytest.mark.parametrize(
    ("reports", "silent", "expected"),
    [
        ([report(0, "communication"), report(2, "exception"), report(1, "died")], {}, (2, "exception")),
        ([report(1, "died"), report(2, "exception")], {}, (1, "died")),
        ([report(0, "communication"), report(3, "left")], {}, (3, "left")),
        ([report(0, "communication"), report(1, "communication")], {}, (0, "communication")),
        ([report(0, "communication"), report(1, "communication")], {3: 8.0, 2: 9.0}, (2, "silent")),
        ([report(0, "exception")], {3: 8.0}, (0, "exception")),
    ],
)
def test_root(reports: list[Report], silent: dict[int, float], expected: tuple[int, str]) -> None:
    root = choose_root(reports, silent)
    assert (root.rank, type(root)) == (expected[0], TYPES[expected[1]])


def test_a_silent_root_says_who_waited() -> None:
    root = choose_root([report(0, "communication")], {1: 7.6})
    assert (
        root.cause.startswith("no sign of life for 8 s") and "rank 0 waited for it: cause of 0" in root.cause
    )


def test_verdict() -> None:
    rank_records = [
        RankRecord(rank=rank, host=f"node{rank}", pid=100 + rank, phase=f"step 3, stage {rank}")
        for rank in range(3)
    ]
    rank_records[2].left = True
    root = Raised(
        rank=1,
        cause="ValueError: a\nb",
        phase="step 3, stage 1, micro-batch 2",
        location="t.py:3, in f",
    )
    assert diagnosis_text(root, rank_records, oom_kills=0) == (
        "[rannc] the job has ended because of rank 1 of 3 (host node1, pid 101)\n"
        "[rannc]   cause   ValueError: a\n"
        "[rannc]           b\n"
        "[rannc]   at      t.py:3, in f\n"
        "[rannc]   in      step 3, stage 1, micro-batch 2\n"
        "[rannc]   rank 0  step 3, stage 0\n"
        "[rannc]   rank 2  left\n"
    )


def failed(rank: int, cause: str) -> Report:
    return Raised(
        rank=rank,
        cause=cause,
        phase="capture",
        cure=f"mend {cause}",
        trace=f"trace of {rank}\n",
    )


def test_the_same_failure_of_several_ranks_is_told_once_by_the_lowest() -> None:
    rank_records = [RankRecord(rank=rank, host="node", pid=100 + rank, phase="capture") for rank in range(4)]
    reports = [failed(2, "A: x"), failed(0, "A: x"), failed(3, "B: y")]
    root = choose_root(reports, {})
    assert root.rank == 0
    lines = diagnosis_text(root, rank_records, oom_kills=0, reports=reports).splitlines()
    assert lines[:3] == [
        "[rannc] the job has ended because of rank 0 of 4 (host node, pid 100)",
        "[rannc]   cause   A: x",
        "[rannc]   cure    mend A: x",
    ]
    assert lines[4:] == [
        "[rannc]   rank 1  capture",
        "[rannc]   rank 2  failed in the same way",
        "[rannc]   rank 3  failed, too: B: y",
        "trace of 0",
        "trace of 3",
    ]


def test_the_out_of_memory_killer_is_told_of_for_the_dead_only() -> None:
    rank_records = [RankRecord(rank=0, host="node0")]
    assert "out-of-memory killer ended 2 process(es) on node0" in diagnosis_text(
        report(0, "died"), rank_records, oom_kills=2
    )
    assert "killer ended" not in diagnosis_text(report(0, "exception"), rank_records, oom_kills=2)


def write_phase(memory: mmap.mmap, text: str) -> None:
    """As a monitor does."""
    monitor = LinkMonitor.__new__(LinkMonitor)
    monitor._memory = memory
    monitor.phase(text)


@pytest.mark.parametrize("text", ["", "step 1, stage 0", "ä" * 300])
def test_phase_memory(text: str) -> None:
    memory = mmap.mmap(-1, monitor_wire.PHASE_BYTES)
    write_phase(memory, "something longer that was there before")
    write_phase(memory, text)
    assert read_phase(memory).rstrip("\ufffd") == text.encode()[:255].decode(errors="ignore")


class Rank:
    """A rank as the hub sees it: a socket."""

    def __init__(
        self,
        port: int,
        rank: int,
        token: str = TOKEN,
        hello: bytes | None = None,
        marked: ProcessMark | None = None,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.reader = self.socket.makefile("r")
        monitor_wire.shake_hands(self.socket, token, rank=rank, limit_seconds=5)
        self.socket.settimeout(5)
        mark = marked or ProcessMark(pid=4000000, start_ticks=1, space="elsewhere")
        members = {
            "host": "elsewhere",
            "pid": mark.pid,
            "start_ticks": mark.start_ticks,
            "space": mark.space,
            "memory": -1,
        }
        self.socket.sendall(
            json.dumps({"type": "hello", **members}).encode() + b"\n" if hello is None else hello
        )

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of this kind."""
        message = json.loads(self.reader.readline())
        assert message["type"] == kind, message
        return message

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


class Job:
    """A hub in a thread and its ranks."""

    def __init__(self, size: int) -> None:
        self.supervisor = Supervisor(size=size, token=TOKEN, bind="127.0.0.1", failed_first=True)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()
        self.ranks = [Rank(self.supervisor.port, rank) for rank in range(size)]

    def ended(self) -> bool:
        self.thread.join(5)
        return not self.thread.is_alive()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(3)
    yield made
    for rank in made.ranks:
        rank.close()
    assert made.ended(), "the hub outlives its ranks"


def test_a_good_end(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    for number, rank in enumerate(job.ranks):
        rank.send({"type": "leave", "phase": "done", "num_calls": 4})
        for other in job.ranks:
            assert other.expect("left") == {"type": "left", "rank": number, "num_calls": 4}
    for rank in job.ranks:
        rank.expect("bye")
        rank.close()
    assert job.ended() and capfd.readouterr().err == ""


def test_a_failure_ends_the_failed_rank_first(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    fail = {
        "type": "fail",
        "kind": "exception",
        "cause": "E: x",
        "phase": "step 2",
        "num_calls": 3,
        "code": 7,
    }
    job.ranks[1].send(fail)
    assert job.ranks[1].expect("end")["code"] == 7
    job.ranks[0].socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        job.ranks[0].socket.recv(1)
    job.ranks[1].close()
    job.ranks[0].socket.settimeout(5)
    assert json.loads(job.ranks[0].socket.recv(100)) == {"type": "end", "code": 7}
    job.ranks[2].expect("end")
    assert "because of rank 1 of 3" in capfd.readouterr().err


def test_a_broken_connection_explains_what_others_report(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.ranks[2].send({"type": "beat", "phase": "step 5, stage 2", "num_calls": 9})
    job.ranks[0].send(
        {"type": "fail", "kind": "communication", "cause": "reset", "phase": "p", "num_calls": 9}
    )
    time.sleep(0.05)
    job.ranks[2].close()
    job.ranks[0].expect("end")
    text = capfd.readouterr().err
    assert (
        "because of rank 2 of 3" in text
        and "in      step 5, stage 2" in text
        and "ended without a word" in text
    )


def test_all_killed_at_once_names_the_first(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.ranks[1].close()
    # The order in which the hub hears of them is the order that it can tell; the others go within its window.
    for _ in range(2000):
        if job.supervisor._reports:
            break
        time.sleep(0.001)
    for rank in (0, 2):
        job.ranks[rank].close()
    assert job.ended()
    assert "because of rank 1 of 3" in capfd.readouterr().err


def test_a_rank_that_dies_after_saying_goodbye_to_some(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job.ranks[0].send({"type": "leave", "phase": "done", "num_calls": 4})
    job.ranks[0].close()
    job.ranks[1].expect("left")
    job.ranks[1].expect("end")
    assert "because of rank 0 of 3" in capfd.readouterr().err


def test_survey(job: Job) -> None:
    job.ranks[1].send({"type": "beat", "phase": "step 5", "num_calls": 9})
    time.sleep(0.1)
    job.ranks[0].send({"type": "survey"})
    states = job.ranks[0].expect("states")["states"]
    assert [state["rank"] for state in states] == [0, 1, 2]
    assert (states[1]["phase"], states[1]["num_calls"], states[1]["left"]) == ("step 5", 9, False)
    assert 0.05 < states[1]["silent_seconds"] < 3


@pytest.mark.parametrize("rank", [0, 9])
def test_a_rank_that_is_taken_or_not_there_is_given_to_nobody(job: Job, rank: int) -> None:
    second = Rank(job.supervisor.port, rank)
    assert second.socket.recv(1) == b""
    second.close()
    job.ranks[0].send({"type": "survey"})
    job.ranks[0].expect("states")


def test_who_does_not_have_the_token_is_turned_away(job: Job) -> None:
    with pytest.raises((ConnectionError, monitor_wire.WireError)):
        Rank(job.supervisor.port, 0, token="no")
    job.ranks[0].send({"type": "survey"})
    job.ranks[0].expect("states")


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 4096,
        b"1",
        b'{"type": "beat", "phase": 1}',
        b'{"type": "beat", "num_calls": 1e999}',
        b'{"type": "beat", "num_calls": true}',
        b'{"type": "fail", "rank": 7, "kind": "exit", "cause": "c", "phase": "p"}',
        b'{"type": "fail", "kind": "x", "cause": "c", "phase": "p"}',
        b'{"type": "fail"}',
        b'{"type": "unknown"}',
        b'{"phase": "p"}',
        b"\xff",
        b'{"type": "beat", "more": 1}',
        b"x" * (monitor_wire.MAX_MESSAGE_BYTES + 1),
    ],
)
def test_what_a_rank_says_is_checked_too(job: Job, line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    job.ranks[1].socket.sendall(line + b"\n")
    job.ranks[0].expect("end")
    text = capfd.readouterr().err
    assert (
        "because of rank 1 of 3" in text and "it sent what the job's monitor does not understand" in text
    ), text


def test_a_rank_that_takes_nothing_keeps_nobody_waiting(job: Job) -> None:
    """Its messages are kept, whole, until it takes them."""
    for _ in range(3000):
        job.ranks[1].send({"type": "survey"})
    begin = time.monotonic()
    job.ranks[0].send({"type": "survey"})
    job.ranks[0].expect("states")
    assert time.monotonic() - begin < 3
    for _ in range(3000):
        job.ranks[1].expect("states")


def marked_child() -> tuple[subprocess.Popen[bytes], ProcessMark]:
    child = subprocess.Popen(["sleep", "60"])
    return child, mark_of(child.pid)


@pytest.mark.parametrize("proof", ["right", "start_ticks", "space"])
def test_only_a_process_that_is_proved_to_be_a_rank_is_ended(
    proof: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not follow "end": killed with its own mark; left alone where time of start or
    numbering are another's.
    """
    monkeypatch.setattr(supervisor_module, "_END_SECONDS", 0.2)
    child, mark = marked_child()
    try:
        if proof == "start_ticks":
            mark = dataclasses.replace(mark, start_ticks=mark.start_ticks - 1)
        if proof == "space":
            mark = dataclasses.replace(mark, space=f"{mark.space}1")
        supervisor = Supervisor(size=1, token=TOKEN, bind="127.0.0.1", failed_first=False)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        rank = Rank(supervisor.port, 0, marked=mark)
        rank.send({"type": "fail", "kind": "exception", "cause": "c", "phase": "p"})
        thread.join(10)
        assert not thread.is_alive()
        if proof == "right":
            assert child.wait(5) == -signal.SIGKILL
        else:
            assert child.poll() is None
        rank.close()
    finally:
        child.kill()
        child.wait()


def test_a_phase_memory_of_this_process_can_be_read() -> None:
    if not hasattr(os, "memfd_create"):
        return
    cookie = monitor_wire.cookie_of(TOKEN)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, monitor_wire.PHASE_BYTES)
    own = mmap.mmap(descriptor, monitor_wire.PHASE_BYTES)
    assert monitor_wire.open_memory(os.getpid(), descriptor, cookie) is None, (
        "without the cookie it is some other file"
    )
    own[: monitor_wire.COOKIE_BYTES] = cookie
    memory = monitor_wire.open_memory(os.getpid(), descriptor, cookie)
    assert memory is not None
    write_phase(own, "step 9")
    os.close(descriptor)
    assert read_phase(memory) == "step 9"
    reader, writer = os.pipe()
    for other in (999_999, -1, 2**40, reader, writer):
        assert monitor_wire.open_memory(os.getpid(), other, cookie) is None
    os.close(reader)
    os.close(writer)


def test_the_folder_is_private_and_has_a_name_that_nobody_can_take_first(tmp_path: Path) -> None:
    first, second = (Path(supervisor_module.make_folder(str(tmp_path))) for _ in range(2))
    assert first != second and all(folder.stat().st_mode & 0o777 == 0o700 for folder in (first, second))
    assert len(first.name) >= len("rannc_") + 32
    assert supervisor_module.make_folder(str(tmp_path / "nowhere")) == ""
