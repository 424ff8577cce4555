"""Small JSON values between all ranks, over any wire that can all-gather bytes.

In: JSON-able values. Out: the values of all ranks, the same lists on every rank. Terms: a *wire* starts byte
collectives (`control_mpi.MpiWire`, `transport.GroupWire`); a *slot* is the fixed number of bytes that every
operation gathers first: a header (what is called, how long the value is) and the value itself when it is
short. Longer values follow in a second collective. So every operation is one all-gather, and ranks that call
different operations find out instead of hanging. A rank whose call has failed takes part in whatever
operation the others are at by `report_failure`, and the others raise its error.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rannc_backend.errors import CommunicationError, RanncError, failure_of_rank
from rannc_backend.runtime.world import Monitor, RankState

SLOT_BYTES = 512
_HEADER = struct.Struct("<IIQ")  # crc of what is called, number of the operation, bytes of the value
_INLINE_BYTES = SLOT_BYTES - _HEADER.size
_FAILURE = 0xFFFFFFFF  # in the place of what is called: the value is the class and the text of an error
_MAX_FAILURE_BYTES = 32_768
# A waiting rank first spins, then yields its core, then sleeps ever longer: the others need the cores more
# (tests/benchmarks/waiting_ranks.py).
_BUSY_SECONDS = 50e-6
_YIELD_SECONDS = 0.002
_SLEEP_SHARE = 0.03  # of the time waited so far, so that a wait gets hardly longer by the sleep at its end
_LONGEST_SLEEP_SECONDS = 0.02
_FROZEN_SECONDS = 3.0


class Pending(Protocol):
    """A collective under way."""

    def test(self) -> bool:
        """Whether it is done; makes progress; raises RuntimeError when it has failed."""
        ...


class Wire(Protocol):
    """Byte collectives over all ranks."""

    def start_allgather(self, send: bytearray, receive: bytearray) -> Pending:
        """Start gathering `send` of each rank, by rank, into `receive`."""
        ...

    def start_broadcast(self, buffer: bytearray, root: int) -> Pending:
        """Start copying the root's `buffer` into everyone's."""
        ...

    def close(self) -> None: ...


class SingleControl:
    """Control of a job of one process."""

    rank = 0
    size = 1

    def allgather(
        self, value: Any, *, what: str = "values", limit_seconds: float | None = None, kind: str = ""
    ) -> list[Any]:
        return [json.loads(_encode(value))]

    def broadcast(
        self, value: Any, *, root: int = 0, what: str = "value", limit_seconds: float | None = None
    ) -> Any:
        return json.loads(_encode(value))

    def barrier(self, *, what: str = "barrier", limit_seconds: float | None = None) -> None:
        return

    def limit_waits(self, seconds: float) -> None:
        return

    def report_failure(self, error: BaseException) -> None:
        return


class WireControl:
    """Control over a wire. Not to be called by two threads at once."""

    def __init__(self, wire: Wire, *, rank: int, size: int, limit_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self._wire = wire
        self._limit_seconds = limit_seconds
        self._num_operations = 0
        self._monitor: Monitor | None = None
        self._send = bytearray(SLOT_BYTES)
        self._receive = bytearray(SLOT_BYTES * size)

    def attach(self, monitor: Monitor) -> None:
        """From now on count operations with `monitor`, and ask it who is missing."""
        self._monitor = monitor

    def limit_waits(self, seconds: float) -> None:
        self._limit_seconds = seconds

    def allgather(
        self, value: Any, *, what: str = "values", limit_seconds: float | None = None, kind: str = ""
    ) -> list[Any]:
        payload = _encode(value)
        limit = self._limit(limit_seconds)
        lengths = self._gather_slots(payload, f"allgather of {what}", limit, kind)
        return [
            json.loads(part) for part in self._gather_values(payload, lengths, f"allgather of {what}", limit)
        ]

    def broadcast(
        self, value: Any, *, root: int = 0, what: str = "value", limit_seconds: float | None = None
    ) -> Any:
        payload = _encode(value) if self.rank == root else b""
        limit = self._limit(limit_seconds)
        lengths = self._gather_slots(payload, f"broadcast of {what}", limit)
        if lengths[root] <= _INLINE_BYTES:
            return json.loads(self._inline(root, lengths[root]))
        buffer = bytearray(payload) if self.rank == root else bytearray(lengths[root])
        self._wait(self._wire.start_broadcast(buffer, root), f"broadcast of {what}", limit)
        return json.loads(buffer)

    def barrier(self, *, what: str = "barrier", limit_seconds: float | None = None) -> None:
        self._gather_slots(b"", what, self._limit(limit_seconds))

    def report_failure(self, error: BaseException) -> None:
        """Take part in the operation that the others are at, or come to, with ``error``, which they raise as
        theirs.
        """
        text = str(error)[: _MAX_FAILURE_BYTES // 16]  # JSON may need twelve bytes for a character
        try:
            self._gather_slots(
                _encode([type(error).__name__, text]), "a call that failed", self._limit_seconds, failed=True
            )
        except RanncError as other:
            # Failed elsewhere too: there is no more to tell.
            if getattr(other, "failed_rank", None) is None:
                raise

    def close(self) -> None:
        """Give the wire back."""
        self._wire.close()

    def _limit(self, limit_seconds: float | None) -> float:
        return self._limit_seconds if limit_seconds is None else limit_seconds

    def _gather_slots(
        self, payload: bytes, what: str, limit_seconds: float, kind: str = "", *, failed: bool = False
    ) -> list[int]:
        """Exchange headers and short values; returns the length of each rank's value in bytes.

        ``kind``: what is called, if ``what`` tells more than that.
        """
        if self._monitor is not None:
            self._monitor.begin_call()
        self._num_operations += 1
        own = (_FAILURE if failed else zlib.crc32((kind or what).encode()) % _FAILURE, self._num_operations)
        _HEADER.pack_into(self._send, 0, *own, len(payload))
        if len(payload) <= _INLINE_BYTES:
            self._send[_HEADER.size : _HEADER.size + len(payload)] = payload
        self._wait(self._wire.start_allgather(self._send, self._receive), what, limit_seconds)
        headers = [_HEADER.unpack_from(self._receive, peer * SLOT_BYTES) for peer in range(self.size)]
        failing = [peer for peer, header in enumerate(headers) if header[0] == _FAILURE]
        if failing:
            lengths = [
                min(header[2], _MAX_FAILURE_BYTES) if peer in failing else 0
                for peer, header in enumerate(headers)
            ]
            texts = self._gather_values(payload if failed else b"", lengths, what, limit_seconds)
            first = next((peer for peer in failing if peer != self.rank), None)
            if first is not None:
                raise failure_of_rank(first, *json.loads(texts[first]))
        odd = [peer for peer, header in enumerate(headers) if header[:2] != own]
        if odd and not failing:
            raise CommunicationError(
                f"this rank is at operation {own[1]} ({what}), but rank(s) {', '.join(map(str, odd))} called "
                "another one",
                rank=self.rank,
                peer=odd[0],
                cure="make every rank call the compiled model the same number of times, in the same modes.",
            )
        return [header[2] for header in headers]

    def _gather_values(
        self, payload: bytes, lengths: list[int], what: str, limit_seconds: float
    ) -> list[bytearray]:
        """The values of all ranks, from the slots or, where one does not fit into its slot, by a collective
        of their own.
        """
        longest = max(lengths)
        if longest <= _INLINE_BYTES:
            return [self._inline(peer, length) for peer, length in enumerate(lengths)]
        receive = bytearray(longest * self.size)
        self._wait(
            self._wire.start_allgather(bytearray(payload[:longest].ljust(longest)), receive),
            what,
            limit_seconds,
        )
        return [receive[peer * longest : peer * longest + length] for peer, length in enumerate(lengths)]

    def _inline(self, peer: int, length: int) -> bytearray:
        start = peer * SLOT_BYTES + _HEADER.size
        return self._receive[start : start + length]

    def _wait(self, pending: Pending, what: str, limit_seconds: float) -> None:
        try:
            done = poll(pending.test, limit_seconds)
        except RuntimeError as error:
            raise CommunicationError(f"{what} broke: {error}", rank=self.rank) from error
        if not done:
            states = [] if self._monitor is None else self._monitor.survey()
            raise missing_ranks_error(what, rank=self.rank, states=states, limit_seconds=limit_seconds)


def poll(test: Callable[[], bool], limit_seconds: float) -> bool:
    """Call `test` until it is true or the limit has passed; returns its last answer. Ctrl-C gets through."""
    if test():
        return True
    start = time.monotonic()
    while not test():
        waited_seconds = time.monotonic() - start
        if waited_seconds > limit_seconds:
            return test()
        if waited_seconds < _BUSY_SECONDS:
            continue
        if waited_seconds < _YIELD_SECONDS:
            time.sleep(0)
        else:
            time.sleep(min(waited_seconds * _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS))
    return True


def missing_ranks_error(
    what: str, *, rank: int, states: Sequence[RankState], limit_seconds: float
) -> CommunicationError:
    """The error for an operation in which not all ranks took part in time, naming those that did not.

    Args:
        states: of all ranks, by rank; empty when nothing is known of them.
    """
    own_calls = states[rank].num_calls if states else 0
    frozen = [state for state in states if state.rank != rank and state.silent_seconds > _FROZEN_SECONDS]
    behind = [state for state in states if state.num_calls < own_calls and state not in frozen]
    parts = [
        f"rank {s.rank} gives no sign of life for {s.silent_seconds:.0f} s (last in: {s.phase})"
        for s in frozen
    ]
    parts += [f"rank {s.rank} has not arrived (it is in: {s.phase})" for s in behind]
    missing = frozen + behind
    return CommunicationError(
        f"{what}: {'; '.join(parts) or 'not all ranks have arrived'}",
        rank=rank,
        peer=missing[0].rank if missing else None,
        limit_seconds=limit_seconds,
    )


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
