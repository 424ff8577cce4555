"""A rank's side of the monitor, against a hub that is played here."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from typing import Any

import pytest

from rannc_backend.errors import CommunicationError, RankFailedError
from rannc_backend.runtime.job import monitor as monitor_module
from rannc_backend.runtime.job import monitor_wire
from rannc_backend.runtime.job.exit_hooks import ExitHooks
from rannc_backend.runtime.job.interpreter_exit import InterpreterExit
from rannc_backend.runtime.job.monitor import LinkMonitor, SingleMonitor, clip


class Ended(BaseException):
    """In place of the end of the process."""


class Link:
    """A monitor of rank 0 and the hub's end of its connection."""

    def __init__(self) -> None:
        self.supervisor, own = socket.socketpair()
        self.supervisor.settimeout(5)
        self.reader = self.supervisor.makefile("r")
        self.monitor = LinkMonitor(own, mmap.mmap(-1, monitor_wire.PHASE_BYTES), rank=0)
        self.monitor.phase("step 1")
        self.monitor.run()

    def tell(self, **message: Any) -> None:
        self.supervisor.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        while True:
            message: dict[str, Any] = json.loads(self.reader.readline())
            if message["type"] == kind:
                return message

    def is_quiet(self, seconds: float) -> bool:
        """Nothing but heartbeats comes in this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.supervisor], [], [], left)[0]:
                message = json.loads(self.reader.readline())
                if message["type"] != "beat":
                    return False
        return True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended(code)

    monkeypatch.setattr(monitor_module, "end_process", end)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    made = Link()
    made.codes = codes  # type: ignore[attr-defined]
    yield made
    made.tell(type="bye")
    time.sleep(0.05)
    made.reader.close()
    made.supervisor.close()


def test_heartbeats_tell_phase_and_calls(link: Link) -> None:
    link.hear("beat")
    link.monitor.phase("step 2, stage 1")
    link.monitor.begin_call()
    assert link.hear("beat") == {"type": "beat", "phase": "step 2, stage 1", "num_calls": 1}


def test_a_phase_is_cheap(link: Link) -> None:
    seconds = (
        min(
            timeit.repeat(
                lambda: link.monitor.phase("step 12, stage 1, micro-batch 3, forward"), number=2000, repeat=7
            )
        )
        / 2000
    )
    assert seconds < 5e-6, f"{seconds * 1e6:.1f} us"


@pytest.mark.parametrize(
    ("error", "kind", "cause", "code"),
    [
        (ValueError("bad"), "exception", "ValueError: bad", 1),
        (MemoryError("1 TiB"), "exception", "MemoryError: 1 TiB", 1),
        (KeyboardInterrupt(), "interrupt", "interrupted (Ctrl-C)", 130),
        (
            CommunicationError("late", rank=0, cure="see it."),
            "communication",
            "CommunicationError: late",
            1,
        ),
        (RankFailedError(rank=1, cause="x"), "communication", "RankFailedError", 1),
    ],
)
def test_reports(link: Link, error: BaseException, kind: str, cause: str, code: int) -> None:
    link.monitor.phase("step 4")
    try:
        raise error
    except BaseException as caught:
        link.monitor.report_error(caught)
    message = link.hear("fail")
    assert (message["kind"], message["code"], message["phase"], message["rank"]) == (kind, code, "step 4", 0)
    assert message["cause"].startswith(cause)
    place = "" if kind == "interrupt" else "rank" if kind == "communication" else "test_monitor.py"
    assert place in message["location"], message["location"]
    cure = {
        "MemoryError": "RANNC_PIPELINE_NUM",
        "CommunicationError": "see it.",
        "RankFailedError": "above",
    }.get(type(error).__name__, "")
    assert cure in message.get("cure", "") and ("cure" in message) == bool(cure)
    link.monitor.report("exit", "later ones do not count")
    assert link.is_quiet(0.3)


def test_told_to_end(link: Link) -> None:
    link.tell(type="end", code=9)
    time.sleep(0.2)
    assert link.codes == [9]  # type: ignore[attr-defined]


def test_a_lost_hub_ends_the_process(link: Link, capfd: pytest.CaptureFixture[str]) -> None:
    link.supervisor.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert link.codes == [1]  # type: ignore[attr-defined]
    assert "the job's monitor has gone" in capfd.readouterr().err
    link.tell = lambda **_: None  # type: ignore[method-assign, assignment]


def test_a_rank_that_left_before_a_call(link: Link) -> None:
    link.monitor.begin_call()
    link.tell(type="left", rank=1, num_calls=1)
    assert link.is_quiet(0.3), "both are done with the same calls"
    with pytest.raises(RankFailedError, match="rank 1 failed: it left the job"):
        link.monitor.begin_call()
    message = link.hear("fail")
    assert (message["kind"], message["rank"]) == ("left", 1)


def test_a_rank_that_leaves_during_a_call(link: Link) -> None:
    link.monitor.begin_call()
    link.tell(type="left", rank=2, num_calls=0)
    message = link.hear("fail")
    assert (message["kind"], message["rank"]) == ("left", 2)


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_wait_for_a_rank_that_has_left(link: Link, begun: str) -> None:
    if begun == "before":
        link.monitor.begin_wait((1,))
    link.tell(type="left", rank=1, num_calls=0)
    time.sleep(0.2)
    if begun == "after":
        link.monitor.begin_wait((1,))
    begin = time.monotonic()
    assert (link.hear("fail")["kind"], time.monotonic() - begin < 3) == ("left", True)


def test_the_last_message_of_a_rank_that_has_left_may_still_arrive(link: Link) -> None:
    link.monitor.begin_wait((1,))
    link.tell(type="left", rank=1, num_calls=0)
    time.sleep(0.2)
    link.monitor.end_wait()
    link.monitor.begin_wait((2,))
    assert link.is_quiet(1.5)
    link.monitor.end_wait()


def test_survey(link: Link) -> None:
    state = {"rank": 0, "host": "h", "phase": "p", "num_calls": 1, "silent_seconds": 0.5, "left": False}
    link.tell(type="states", states=[])
    link.hear("beat")

    def answer() -> None:
        link.hear("survey")
        link.tell(type="states", states=[state])

    thread = threading.Thread(target=answer)
    thread.start()
    assert [(found.rank, found.phase) for found in link.monitor.survey()] == [(0, "p")]
    thread.join()


def test_goodbye_waits_for_the_others(link: Link) -> None:
    def answer() -> None:
        link.hear("leave")
        time.sleep(0.3)
        link.tell(type="bye")

    thread = threading.Thread(target=answer)
    thread.start()
    begin = time.monotonic()
    link.monitor.close()
    assert time.monotonic() - begin > 0.25
    thread.join()
    link.tell = lambda **_: None  # type: ignore[method-assign, assignment]


def test_a_goodbye_has_a_limit(
    link: Link, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is not heard of any more is reported; ranks that live are waited for; a hub that is stopped
    is not.
    """
    monkeypatch.setattr(monitor_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(monitor_module, "_SURVEY_SECONDS", 0.1)
    link.monitor._limit_seconds = 0.3
    state = {"host": "a", "phase": "", "num_calls": 0, "left": False}

    def answer(seconds: float, silent: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            link.hear("survey")
            states = [
                {**state, "rank": rank, "silent_seconds": silent if rank == 1 else 0.0} for rank in range(3)
            ]
            link.tell(type="states", states=states)

    def play() -> None:
        answer(1.0, silent=0.1)
        answer(0.1, silent=5.0)

    thread = threading.Thread(target=play)
    thread.start()
    begin = time.monotonic()
    monkeypatch.setattr(link.monitor, "await_end", lambda: (_ for _ in ()).throw(Ended()))
    with pytest.raises(Ended):
        link.monitor.close()
    assert time.monotonic() - begin > 1.0, "a rank that lives was not waited for"
    thread.join()
    report = link.hear("fail")
    assert (
        report["kind"] == "communication"
        and "rank 1 (limit 0.3 s)" in report["cause"]
        and "rank 2" not in report["cause"]
    )
    link.monitor._reported = False
    with pytest.raises(Ended):
        link.monitor.close()
    assert link.codes == [1]  # type: ignore[attr-defined]
    assert "the job's monitor has not answered" in capfd.readouterr().err


def test_hooks_are_put_back(link: Link) -> None:
    before = (sys.excepthook, os._exit, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    hooks = ExitHooks(link.monitor, lambda: None, InterpreterExit())
    hooks.install()
    assert sys.excepthook != before[0] and os._exit != before[1]
    hooks.remove()
    after = (sys.excepthook, os._exit, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert before == after
    assert signal.set_wakeup_fd(-1) == -1


def test_hooks_leave_the_users_handlers_alone() -> None:
    """In a process of its own: the user's excepthook runs, their SIGTERM handler stays, what they want at
    exit runs.
    """
    script = """
import atexit, mmap, os, signal, socket, sys
from rannc_backend.runtime.job import monitor_wire
from rannc_backend.runtime.job.exit_hooks import ExitHooks
from rannc_backend.runtime.job.interpreter_exit import InterpreterExit
from rannc_backend.runtime.job.monitor import LinkMonitor
own_handler = lambda *_: None
signal.signal(signal.SIGTERM, own_handler)
sys.excepthook = lambda kind, error, trace: print("users hook", error)
atexit.register(lambda: print("users atexit, before"))
hub, own = socket.socketpair()
monitor = LinkMonitor(own, mmap.mmap(-1, monitor_wire.PHASE_BYTES), rank=0)
ExitHooks(monitor, lambda: None, InterpreterExit()).install()
monitor.run()
atexit.register(lambda: print("users atexit, after"))
assert signal.getsignal(signal.SIGTERM) is own_handler

raise ValueError("x")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["users hook x", "users atexit, after", "users atexit, before"], done
    assert done.returncode == 1


def test_single() -> None:
    monitor = SingleMonitor()
    monitor.phase("step 1")
    monitor.begin_call()
    monitor.close()
    assert monitor.survey() == []


def test_clip() -> None:
    assert clip("a\n" * 50).count("\n") < 10 and len(clip("a" * 5000)) == 1000


END = """
import os, sys, threading, time
from rannc_backend.runtime.job import monitor

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

{before}
monitor.end_process(7)
"""
FULL_PIPE = """
reader, writer = os.pipe()
sys.stdout = open(writer, "w")
threading.Thread(target=lambda: sys.stdout.write("x" * 1_000_000), daemon=True).start()
time.sleep(0.2)
"""
SHUTS_DOWN = "threading.Thread.start = refuse\n"  # as in Python 3.12


@pytest.mark.parametrize(
    ("before", "code", "words"),
    [
        ("print('last words')", 7, b"last words\n"),
        (SHUTS_DOWN + "print('last words')", 7, b"last words\n"),
        (FULL_PIPE, 7, b""),
        (FULL_PIPE + SHUTS_DOWN, 1, b""),
    ],
    ids=["words", "words-shutting_down", "full_pipe", "full_pipe-shutting_down"],
)
def test_a_process_ends_with_its_words_and_code(before: str, code: int, words: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", END.format(before=before)], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, words, b"")
