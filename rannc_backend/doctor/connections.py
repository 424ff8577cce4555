"""Whether each rank can connect to each other one, before the job that needs it starts: a firewall is told,
with hosts and ports.

In: what the launcher says of this rank, and MPI or torchrun's store to tell addresses. Out: the attempts that
failed. Every rank listens at the address that a job would use, at a port that the system chooses, as a job
does. What connects must show the word that its rank was told. Bounded: a fixed number of tries of a fixed
time, to all ranks at once.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rannc_backend.runtime.comm.control import WireControl, poll
from rannc_backend.runtime.comm.control_mpi import MpiWire, load_mpi
from rannc_backend.runtime.job import meeting as meetings
from rannc_backend.runtime.launch import Launch, find_launch

NUM_TRIES = 2
TRY_SECONDS = 3.0
_WORD_BYTES = 16
_MAX_THREADS = 32
_EVERY_ADDRESS = "0.0.0.0"

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each one tells, by rank. Collective."""


def connection_answer(environ: Mapping[str, str], limit_seconds: float) -> dict[str, Any] | None:
    """Try all connections of this job; None where there is one rank, or no way to tell addresses but by the
    connections themselves.
    """
    launch = find_launch(environ)
    gather = _gather_of(launch, environ, limit_seconds) if launch.size > 1 else None
    return None if gather is None else try_connections(gather, launch.rank, environ)


def try_connections(gather: Gather, rank: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """All connections between ranks, each way. Collective; every rank gets the same answer.

    Returns:
        `num_ranks`, `addresses` (by rank, as "10.0.0.1 (eth0)"), and `failed`: for each connection that could
        not be made the ranks and hosts of both ends, the address and port, and why.
    """
    networks, addresses = zip(
        *gather([meetings.network(), meetings.chosen_first(meetings.own_addresses(), environ)]), strict=True
    )
    is_one_host = len(set(networks)) == 1
    interface, address = _listening_at(rank, networks, addresses)
    with _Listener(address) as listener:
        told = gather([socket.gethostname(), address, listener.port, listener.word.hex(), interface])
        others = [other for other in range(len(told)) if other != rank]
        with ThreadPoolExecutor(min(_MAX_THREADS, max(1, len(others)))) as pool:
            reasons = list(
                pool.map(
                    lambda other: why_not(told[other][1], told[other][2], bytes.fromhex(told[other][3])),
                    others,
                )
            )
        own = [
            {
                "rank": rank,
                "host": told[rank][0],
                "peer": other,
                "peer_host": told[other][0],
                "at": f"{told[other][1]}:{told[other][2]}",
            }
            | {"why": reason, "from": address}
            for other, reason in zip(others, reasons, strict=True)
            if reason
        ]
        # Nobody stops listening before all have tried.
        failed = [attempt for each in gather(own) for attempt in each]
    places = [f"{each[1]} ({each[4] or 'unknown interface'})" for each in told]
    return {"num_ranks": len(told), "is_one_host": is_one_host, "addresses": places, "failed": failed}


def why_not(address: str, port: int, word: bytes) -> str:
    """Why a connection cannot be made, after some tries; "" if it can."""
    reason = ""
    for _ in range(NUM_TRIES):
        begin = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=TRY_SECONDS) as connection:
                connection.settimeout(TRY_SECONDS)
                found = _received(connection)
            if found == word:
                return ""
            reason = "something else answers there"
        except OSError as error:
            reason = (
                "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
            )
            reason += f" ({NUM_TRIES} tries of {TRY_SECONDS:g} s)"
            time.sleep(max(0.0, min(0.2, TRY_SECONDS - (time.monotonic() - begin))))
    return reason


class _Listener:
    """Tells its word to everybody who connects, until its context ends."""

    def __init__(self, address: str) -> None:
        self.word = secrets.token_bytes(_WORD_BYTES)
        self._server = meetings.listen_at(address)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="rannc-doctor", daemon=True)

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):
                    connection.settimeout(TRY_SECONDS)
                    connection.sendall(self.word)


def _received(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < _WORD_BYTES and (more := connection.recv(_WORD_BYTES - len(data))):
        data += more
    return data


def _listening_at(
    rank: int, networks: Sequence[str], addresses: Sequence[Sequence[meetings.Address]]
) -> tuple[str, str]:
    """Interface and address where a job's ranks would listen: the loopback on one host, else what the user
    has named, or the first.
    """
    if len(set(networks)) == 1:
        return "loopback", meetings.LOOPBACK
    own = addresses[rank]
    return (own[0][0], own[0][1]) if own else ("", _EVERY_ADDRESS)


def _gather_of(launch: Launch, environ: Mapping[str, str], limit_seconds: float) -> Gather | None:
    if launch.launcher == "mpi":
        meetings.keep_mpi_inside(os.environ)
        control = WireControl(
            MpiWire(load_mpi(launch)), rank=launch.rank, size=launch.size, limit_seconds=limit_seconds
        )
        return lambda value: control.allgather(value, what="addresses of the ranks")
    limit = datetime.timedelta(seconds=limit_seconds)
    store = meetings.store_of_agent(environ, rank=launch.rank, size=launch.size, limit=limit)
    if store is None:
        return None
    rounds = itertools.count()

    def gather(value: Any) -> list[Any]:
        number = next(rounds)
        keys = [f"rannc-doctor/{number}/{other}" for other in range(launch.size)]
        store.set(keys[launch.rank], json.dumps(value))
        if not poll(lambda: bool(store.check(keys)), limit_seconds):
            raise TimeoutError(
                f"rank {launch.rank}: not all ranks have come to the store within {limit_seconds:g} s"
            )
        return [meetings.parsed(store.get(key), key) for key in keys]

    return gather
