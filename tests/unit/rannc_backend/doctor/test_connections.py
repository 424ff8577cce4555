"""Connections between ranks, here threads of one process: those that can be made, a firewall, and a port that
somebody else has.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rannc_backend.doctor import connections
from rannc_backend.doctor.answers import check_connections
from rannc_backend.runtime.job import meeting


class Ranks:
    """Threads that tell each other values."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._values: list[Any] = [None] * num_ranks

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def answers(num_ranks: int) -> list[dict[str, Any]]:
    ranks = Ranks(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        waiting = [
            pool.submit(connections.try_connections, ranks.gather_of(rank), rank, {})
            for rank in range(num_ranks)
        ]
        return [future.result(60) for future in waiting]


def test_ranks_of_one_host_reach_each_other() -> None:
    found = answers(3)
    assert found[0] == found[1] == found[2] and found[0]["is_one_host"] and found[0]["failed"] == []
    assert check_connections(found[0]).text == "3 ranks reach each other at 127.0.0.1 (loopback)"
    assert check_connections(None).status == "ok"


def test_a_firewall_is_told_with_hosts_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = iter(["a", "b"])
    monkeypatch.setattr(meeting, "network", lambda: next(networks))
    monkeypatch.setattr(meeting, "own_addresses", lambda: [["eth0", "127.0.0.1", "255.0.0.0"]])
    monkeypatch.setattr(connections, "TRY_SECONDS", 0.3)

    def closed(address: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", closed)
    begin = time.monotonic()
    found = answers(2)[0]
    assert time.monotonic() - begin < 20
    assert {(each["rank"], each["peer"]) for each in found["failed"]} == {(0, 1), (1, 0)}
    finding = check_connections(found)
    assert finding.status == "problem" and "firewall" in finding.cure
    at = found["failed"][0]["at"]
    assert at.startswith("127.0.0.1:") and f"at {at}: no answer (2 tries of 0.3 s)" in finding.text


def test_a_port_that_is_closed_and_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TRY_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connections.why_not("127.0.0.1", port, b"w" * 16) == "no answer (2 tries of 0.2 s)"
    assert connections.why_not("127.0.0.1", port, b"w" * 16) == "connection refused (2 tries of 0.2 s)"


def test_somebody_else_s_word_is_none() -> None:
    with connections._Listener("127.0.0.1") as listener:
        assert connections.why_not("127.0.0.1", listener.port, listener.word) == ""
        assert connections.why_not("127.0.0.1", listener.port, b"w" * 16) == "something else answers there"
