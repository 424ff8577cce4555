"""Where ranks come in at the monitor process, and strangers do not.

In: connections of anybody who reaches the port. Out: connections that have shown the token, with the first
message. A stranger costs one of a bounded number of places for a bounded time, and what it sends is read up
to the size that a rank would send; nobody waits for it. Standard library only, as the monitor process is a
plain script.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rannc_backend.runtime.job.monitor_wire import (
    ANSWER_BYTES,
    HANDSHAKE_SECONDS,
    Lines,
    WireError,
    new_challenge,
    proof_of,
    rank_of_answer,
)

_FEWEST_PLACES = 128
# Between two looks at the ranks that are in, so that a crowd at the door does not keep them waiting.
_MAX_AT_ONCE = 32
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_SECONDS = 0.1


@dataclass(eq=False)
class Stranger:
    """A connection before its first message.

    Attributes:
        until: when it must have sent that.
        rank: whose it is, once that is proved.
    """

    connection: socket.socket
    challenge: bytes
    until: float
    answer: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    lines: Lines = field(default_factory=Lines)


class Door:
    """The listening socket and the strangers in front of it.

    Args:
        bind: address to listen on.
        admit: takes a connection, its rank, its first messages and the lines of it; returns whether it may
        stay.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        token: str,
        bind: str,
        num_ranks: int,
        admit: Callable[[socket.socket, int, list[dict[str, Any]], Lines], bool],
    ) -> None:
        self._selector, self._token, self._admit = selector, token, admit
        self._num_places = _FEWEST_PLACES + 2 * num_ranks
        # By age, as they come first in are first out.
        self._strangers: dict[Stranger, None] = {}
        self._rests_until = 0.0
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._server = socket.create_server((bind, 0), family=family, backlog=self._num_places)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def wait_seconds(self, most: float) -> float:
        """How long may pass before `sweep` must be called."""
        now = time.monotonic()
        oldest = next(iter(self._strangers), None)
        times = [
            most,
            *([] if oldest is None else [oldest.until - now]),
            *([self._rests_until - now] if self._rests_until else []),
        ]
        return max(0.0, min(times))

    def accept(self) -> None:
        """Take in who waits in front of the door."""
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if error.errno in _NO_MORE_FILES:
                    self._rest()
                return
            connection.setblocking(False)
            stranger = Stranger(connection, new_challenge(), time.monotonic() + HANDSHAKE_SECONDS)
            if len(self._strangers) >= self._num_places:
                # A rank answers within moments, so the oldest is the least likely to be one.
                self.drop(next(iter(self._strangers)))
            self._strangers[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            try:
                connection.send(stranger.challenge)  # fits into any empty buffer
            except OSError:
                self.drop(stranger)

    def read(self, stranger: Stranger) -> None:
        """Take what a stranger has sent; lets it in or turns it away, or waits for more."""
        if stranger not in self._strangers:
            return
        try:
            data = stranger.connection.recv(
                ANSWER_BYTES - len(stranger.answer) if stranger.rank is None else 65_536
            )
            if not data:
                self.drop(stranger)
            elif stranger.rank is None:
                self._take_answer(stranger, data)
            else:
                self._take_first(stranger, data)
        except BlockingIOError:
            return
        except (OSError, WireError):
            self.drop(stranger)

    def sweep(self) -> None:
        """Turn away who has taken too long."""
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if stranger.until <= now]:
            self.drop(stranger)
        if self._rests_until and self._rests_until <= now:
            self._rests_until = 0.0
            self._selector.register(self._server, selectors.EVENT_READ, self)

    def drop(self, stranger: Stranger) -> None:
        """Turn a stranger away."""
        if stranger in self._strangers:
            del self._strangers[stranger]
            self._selector.unregister(stranger.connection)
            stranger.connection.close()

    def close(self) -> None:
        """Let nobody in any more."""
        for stranger in list(self._strangers):
            self.drop(stranger)
        if not self._rests_until:
            self._selector.unregister(self._server)
        self._rests_until = 0.0
        self._server.close()

    def _take_answer(self, stranger: Stranger, data: bytes) -> None:
        stranger.answer += data
        if len(stranger.answer) < ANSWER_BYTES:
            return
        answer = bytes(stranger.answer)
        stranger.rank = rank_of_answer(stranger.challenge, answer, self._token)
        if stranger.rank is None:
            raise WireError("no rank of this job")
        stranger.connection.send(proof_of(stranger.challenge, answer, self._token))

    def _take_first(self, stranger: Stranger, data: bytes) -> None:
        messages = list(stranger.lines.feed(data))
        if not messages:
            return
        assert stranger.rank is not None
        del self._strangers[stranger]
        self._selector.unregister(stranger.connection)
        if not self._admit(stranger.connection, stranger.rank, messages, stranger.lines):
            stranger.connection.close()

    def _rest(self) -> None:
        """There are no file descriptors left: try again later, and until then do not ask."""
        self._selector.unregister(self._server)
        self._rests_until = time.monotonic() + _REST_SECONDS
