"""Who comes in at the job's monitor process: over real sockets, against the process itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rannc_backend.errors import CommunicationError
from rannc_backend.runtime.job import monitor as monitor_module
from rannc_backend.runtime.job import monitor_door, monitor_wire
from rannc_backend.runtime.job.monitor import LinkMonitor
from rannc_backend.runtime.job.monitor_link import SupervisorAddress, join_supervisor, start_supervisor
from rannc_backend.runtime.job.supervisor import Supervisor
from tests.strangers import NUM_HELD, Strangers

NUM_INPUTS = 10_000


class Running:
    """The monitor process of a job of two ranks, both of them joined from here."""

    def __init__(self, folder_in: str) -> None:
        before = {child.pid for child in psutil.Process().children()}
        self.address = start_supervisor(size=2, bind="127.0.0.1", failed_first=False, folder_in=folder_in)
        (self.process,) = [child for child in psutil.Process().children() if child.pid not in before]
        self.ranks = [self.join(rank) for rank in range(2)]

    def join(self, rank: int) -> LinkMonitor:
        return join_supervisor(self.address, rank=rank, own_host=socket.gethostname(), limit_seconds=10)

    def survey_seconds(self) -> float:
        """How long the monitor takes to answer a rank."""
        rank = self.ranks[0]
        rank._states.clear()
        begin = time.monotonic()
        rank._send({"type": "survey"})
        assert rank._states.wait(10), "no answer"
        assert len(rank._last_states) == 2
        return time.monotonic() - begin

    def end(self) -> int | None:
        """Both ranks leave in order; the monitor's exit code."""
        for rank in self.ranks:
            rank._send({"type": "leave", "note": "", **rank._place()})
        for rank in self.ranks:
            assert rank._bye.wait(5)
            rank._connection.shutdown(socket.SHUT_RDWR)
            rank._thread.join(5)
            rank.drop()
        _, status = os.waitpid(self.process.pid, 0)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    def end(code: int) -> None:
        raise AssertionError(f"the process was told to end with {code}")

    monkeypatch.setattr(monitor_module, "end_process", end)
    made = Running("")
    yield made
    assert made.end() == 0


def test_ten_thousand_strangers_disturb_nobody(running: Running, capfd: pytest.CaptureFixture[str]) -> None:
    strangers, slowest = Strangers(running.address.port, seed=1), 0.0
    memory, begin = running.process.memory_info().rss, time.monotonic()
    for _ in range(NUM_INPUTS // 500):
        strangers.come(500)
        slowest = max(slowest, running.survey_seconds())
    seconds = time.monotonic() - begin
    assert strangers.num_challenged > NUM_INPUTS / 5
    assert running.process.num_fds() < 2 * NUM_HELD + 50
    assert running.process.memory_info().rss - memory < 20e6
    assert slowest < 1.0, f"a rank waited {slowest:.2f} s"
    strangers.go()
    assert capfd.readouterr().err == ""
    assert seconds < 60, (
        f"{NUM_INPUTS} inputs in {seconds:.1f} s, a rank waited {slowest * 1e3:.0f} ms at most"
    )


def test_a_slow_sender_keeps_nobody_waiting_and_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte at a time, forever: as many of them as there are places; ranks that come then get in, and
    these are out in time.
    """
    monkeypatch.setattr(monitor_door, "HANDSHAKE_SECONDS", 1.0)
    token = monitor_wire.new_token()
    supervisor = Supervisor(size=2, token=token, bind="127.0.0.1", failed_first=False)
    threading.Thread(target=supervisor.run, daemon=True).start()
    address = SupervisorAddress(host="127.0.0.1", port=supervisor.port, token=token)
    slow = [socket.create_connection(("127.0.0.1", address.port)) for _ in range(300)]
    begin = time.monotonic()
    ranks = [join_supervisor(address, rank=rank, own_host="here", limit_seconds=10) for rank in range(2)]
    assert time.monotonic() - begin < 2
    last = slow[-1]
    last.settimeout(1)
    last.recv(monitor_wire.CHALLENGE_BYTES)
    with pytest.raises(OSError):  # noqa: PT012 - whenever it is noticed
        while time.monotonic() - begin < 5:
            last.send(b"x")
            time.sleep(0.05)
    assert time.monotonic() - begin < 3 and not supervisor._door._strangers
    for connection in slow:
        connection.close()
    for rank in ranks:
        rank._send({"type": "leave", "note": "", **rank._place()})
    for rank in ranks:
        assert rank._bye.wait(5)
        rank._connection.shutdown(socket.SHUT_RDWR)


def test_the_token_is_not_sent(running: Running) -> None:
    """All that passes in a handshake and after it, read on the way."""
    server = socket.create_server(("127.0.0.1", 0))
    said = bytearray()
    client = socket.create_connection(server.getsockname())
    middle, _ = server.accept()
    token = running.address.token
    challenge = monitor_wire.new_challenge()
    middle.sendall(challenge)
    thread = threading.Thread(target=lambda: monitor_wire.shake_hands(client, token, rank=0, limit_seconds=5))
    thread.start()
    while len(said) < monitor_wire.ANSWER_BYTES:
        said += middle.recv(4096)
    middle.sendall(monitor_wire.proof_of(challenge, bytes(said), token))
    thread.join()
    everything = challenge + bytes(said) + monitor_wire.proof_of(challenge, bytes(said), token)
    assert token.encode() not in everything and bytes.fromhex(token) not in everything
    for end in (client, middle, server):
        end.close()


def test_a_rank_does_not_talk_to_another_monitor(running: Running) -> None:
    """Somebody who has taken the port: knows the protocol, not the token."""
    with pytest.raises(CommunicationError, match="no connection to the job's monitor at 127.0.0.1"):
        wrong = SupervisorAddress(host="127.0.0.1", port=running.address.port, token=monitor_wire.new_token())
        join_supervisor(wrong, rank=0, own_host="here", limit_seconds=0.3)
    challenge = monitor_wire.new_challenge()
    answer = monitor_wire.answer_to(challenge, running.address.token, 0)
    assert monitor_wire.proof_of(challenge, answer, running.address.token) != monitor_wire.proof_of(
        challenge, answer, "another"
    )
    with pytest.raises(monitor_wire.WireError, match="not a monitor"):
        monitor_wire.answer_to(b"x" * monitor_wire.CHALLENGE_BYTES, running.address.token, 0)


def test_an_answer_is_good_for_its_challenge_only() -> None:
    token, challenge = monitor_wire.new_token(), monitor_wire.new_challenge()
    answer = monitor_wire.answer_to(challenge, token, 7)
    assert monitor_wire.rank_of_answer(challenge, answer, token) == 7
    assert monitor_wire.rank_of_answer(monitor_wire.new_challenge(), answer, token) is None
    assert monitor_wire.rank_of_answer(challenge, answer, monitor_wire.new_token()) is None
    for place in range(len(answer)):
        assert (
            monitor_wire.rank_of_answer(
                challenge, answer[:place] + bytes((answer[place] ^ 1,)) + answer[place + 1 :], token
            )
            is None
        )
    assert monitor_wire.rank_of_answer(challenge, answer[:-1], token) is None


def test_the_jobs_folder_is_private_and_goes_with_the_job(tmp_path: Path) -> None:
    """It stays until the ranks' processes are gone, as they use it until then."""
    script = """
import sys, time
from rannc_backend.runtime.job.monitor_link import join_supervisor, start_supervisor
address = start_supervisor(size=1, bind="127.0.0.1", failed_first=False, folder_in=sys.argv[1])
open(f"{address.folder}/store", "w").close()
rank = join_supervisor(address, rank=0, own_host="here", limit_seconds=10)
rank.close()
time.sleep(0.5)
open(f"{address.folder}/store").close()
print(address.folder)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path and folder.name.startswith("rannc_")
    until = time.monotonic() + 5
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists() and not list(tmp_path.iterdir())
