"""What somebody who does not belong to a job may do at one of its ports.

In: a port, a seed. Out: connections that say all sorts of things. Nothing here has a job's token.
"""

from __future__ import annotations

import random
import socket
import struct
from collections import deque
from collections.abc import Callable

from rannc_backend.runtime.job import monitor_wire

# Strangers that hold their connection stay until so many others have come.
NUM_HELD = 150
_RESET = struct.pack("ii", 1, 0)


def random_bytes(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((1, 7, 67, 68, 69, 500, 5000)))


def brackets(chance: random.Random) -> bytes:
    return chance.choice((b"[", b'{"a":', b"(")) * chance.choice((10, 4096, 60_000))


def json_lines(chance: random.Random) -> bytes:
    value = chance.choice(
        (
            b'{"token": "", "rank": 0}',
            b'{"type": "end", "code": 1}',
            b"1e999",
            b"null",
            b'"\\ud800"',
            b"9" * 5000,
        )
    )
    return (value + b"\n") * chance.randint(1, 20)


def protocols(chance: random.Random) -> bytes:
    return chance.choice(
        (
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"SSH-2.0-x\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"\0" * 300,
        )
    )


def wrong_answer(chance: random.Random, challenge: bytes) -> bytes:
    """What a rank would say, with another token, to another challenge, cut off, or with more behind it."""
    asked = challenge if chance.random() < 0.7 else monitor_wire.new_challenge()
    answer = monitor_wire.answer_to(asked, monitor_wire.new_token(), chance.choice((0, 1, 2**32 - 1)))
    end = chance.choice((len(answer), len(answer), chance.randrange(len(answer))))
    return answer[:end] + chance.choice((b"", b"[" * 4096 + b"\n", b'{"type": "fail"}\n'))


_SAYINGS: tuple[Callable[[random.Random], bytes], ...] = (random_bytes, brackets, json_lines, protocols)


class Strangers:
    """Connections to one port, of which the youngest stay open."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._chance = random.Random(seed)
        self._held: deque[socket.socket] = deque()
        self.num_challenged = 0

    def come(self, number: int) -> None:
        """So many more of them."""
        for _ in range(number):
            self._come()

    def _come(self) -> None:
        chance = self._chance
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        try:
            if chance.random() < 0.4:
                challenge = connection.recv(monitor_wire.CHALLENGE_BYTES)
                self.num_challenged += len(challenge) == monitor_wire.CHALLENGE_BYTES
                said = (
                    wrong_answer(chance, challenge) if len(challenge) == monitor_wire.CHALLENGE_BYTES else b""
                )
            else:
                said = chance.choice(_SAYINGS)(chance)
            if chance.random() < 0.3:
                said = said[: chance.randrange(1, 60)]
            connection.setblocking(False)
            connection.send(said)
            if chance.random() < 0.2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            pass  # turned away already
        if chance.random() < 0.5:
            connection.close()
            return
        self._held.append(connection)
        while len(self._held) > NUM_HELD:
            self._held.popleft().close()

    def go(self) -> None:
        """All of them."""
        while self._held:
            self._held.popleft().close()
