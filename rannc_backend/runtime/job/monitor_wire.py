"""How the ranks and the job's monitor process talk: who may, and what a message may be.

In: bytes of strangers. Out: frames of fixed size until both sides have shown that they have the token, then
messages of bounded size whose members are of the types that they should be; anything else is a `WireError`.
Standard library only, as for all of the monitor.

The handshake. Monitor to rank: MAGIC, a nonce. Rank to monitor: a nonce, its number, HMAC-SHA256 over all of
this with the token as key. Monitor to rank: the same kind of proof. The token itself is never sent here.
After it, lines of JSON objects in both directions.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

MAGIC = b"rannc 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_RANK = struct.Struct(">I")
CHALLENGE_BYTES = len(MAGIC) + _NONCE_BYTES
ANSWER_BYTES = _NONCE_BYTES + _RANK.size + _PROOF_BYTES
PROOF_BYTES = _PROOF_BYTES
# From the connection to the first message, whatever comes in between.
HANDSHAKE_SECONDS = 5.0
# A cause and a cure have 1,000 characters, which JSON writes with up to twelve bytes each, a traceback 24,000
# bytes; a phase has 255 bytes.
MAX_MESSAGE_BYTES = 65_536
# What the monitor says of all ranks is one message.
MAX_SURVEY_BYTES = 2**26
COOKIE_BYTES = 16
_MAX_NUMBER = 2**63

PHASE_BYTES = 512


class WireError(ValueError):
    """What came is not what the other side would send."""


def new_token() -> str:
    """What the ranks of a job have, and nobody else."""
    return secrets.token_hex(32)


def new_challenge() -> bytes:
    """What the monitor says to a stranger."""
    return MAGIC + secrets.token_bytes(_NONCE_BYTES)


def answer_to(challenge: bytes, token: str, rank: int) -> bytes:
    """What a rank says to a challenge.

    Raises:
        WireError: it is not a monitor's.
    """
    if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(MAGIC):
        raise WireError("not a monitor of this version")
    said = secrets.token_bytes(_NONCE_BYTES) + _RANK.pack(rank)
    return said + _mac(token, b"rank", challenge, said)


def rank_of_answer(challenge: bytes, answer: bytes, token: str) -> int | None:
    """The rank that gave the answer; None if it does not have the token."""
    said, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if len(answer) != ANSWER_BYTES or not hmac.compare_digest(proof, _mac(token, b"rank", challenge, said)):
        return None
    return int(_RANK.unpack(said[_NONCE_BYTES:])[0])


def proof_of(challenge: bytes, answer: bytes, token: str) -> bytes:
    """What shows a rank that the monitor has the token."""
    return _mac(token, b"monitor", challenge, answer)


def cookie_of(token: str) -> bytes:
    """What a phase memory begins with, so that a file can be told to be one of this job's."""
    return _mac(token, b"phase memory")[:COOKIE_BYTES]


def _mac(token: str, *parts: bytes) -> bytes:
    # Parts are told apart by their lengths: the first is one of a few words, all others are of fixed size.
    return hmac.new(token.encode(), b"\0".join((parts[0], b"".join(parts[1:]))), hashlib.sha256).digest()


def shake_hands(connection: socket.socket, token: str, *, rank: int, limit_seconds: float) -> None:
    """A rank's side of the handshake.

    Raises:
        WireError: the other side is no monitor, or not that of this job.
        OSError: the connection broke, or the limit passed.
    """
    until = time.monotonic() + limit_seconds
    challenge = _receive(connection, CHALLENGE_BYTES, until)
    answer = answer_to(challenge, token, rank)
    connection.sendall(answer)
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES, until), proof_of(challenge, answer, token)):
        raise WireError("the monitor there is not that of this job")


def _receive(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the monitor closed the connection")
        data += more
    return data


class Lines:
    """The messages in a stream of bytes.

    Args:
        most_bytes: of one message.
    """

    def __init__(self, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises:
            WireError: a message is too long, no JSON object, or has a member of a wrong type.
        """
        self._unread += data
        *lines, rest = self._unread.split(b"\n") if b"\n" in data else [self._unread]
        self._unread = rest
        for line in (*lines, rest):
            if len(line) > self._most_bytes:
                raise WireError(f"a message of more than {self._most_bytes} bytes")
        for line in lines:
            yield parse(bytes(line))


def parse(line: bytes) -> dict[str, Any]:
    """One message.

    Raises:
        WireError: it is no JSON object, or has a member of a wrong type.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise WireError(f"a {type(message).__name__} in place of an object")
    check(message, _MEMBERS)
    if "type" not in message:
        raise WireError("a message without a type")
    return message


def check(message: Mapping[str, Any], members: Mapping[str, type]) -> None:
    """Whether the members that are there are of these types.

    Raises:
        WireError: one is not, or there is one more.
    """
    for name, value in message.items():
        kind = members.get(name)
        if kind is None:
            raise WireError(f"a member {name[:40]!r}")
        # bool is an int to Python.
        right = type(value) is kind or (kind is float and type(value) is int)
        if not right or (kind is int and not -_MAX_NUMBER < value < _MAX_NUMBER):
            raise WireError(f"{name} is {str(value)[:40]!r}")


_MEMBERS: Mapping[str, type] = {
    "type": str,
    "rank": int,
    "host": str,
    "pid": int,
    "start_ticks": int,
    "space": str,
    "memory": int,
    "phase": str,
    "num_calls": int,
    "kind": str,
    "cause": str,
    "location": str,
    "cure": str,
    "trace": str,
    "note": str,
    "code": int,
    "states": list,
}
STATE_MEMBERS: Mapping[str, type] = {
    "rank": int,
    "host": str,
    "phase": str,
    "num_calls": int,
    "silent_seconds": float,
    "left": bool,
}


def required(message: Mapping[str, Any], *names: str) -> list[Any]:
    """The members of these names.

    Raises:
        WireError: one is missing.
    """
    missing = [name for name in names if name not in message]
    if missing:
        raise WireError(f"a message {message.get('type', '')!r} without {', '.join(missing)}")
    return [message[name] for name in names]


@dataclass(frozen=True)
class Report:
    """One rank's account of a failure; a type for each way to fail.

    Attributes:
        weight: lower explains higher: a rank that died or raised explains one that missed it, and both explain a broken
            connection.
        phase: what the failed rank was doing.
        location: place in the user's source; "" if unknown.
        cure: what to change; "" if unknown.
        trace: the traceback, or what is to be seen of it.
        code: exit code of the job.
    """

    weight: ClassVar[int] = 0
    rank: int
    cause: str
    phase: str = ""
    location: str = ""
    code: int = 1
    cure: str = ""
    trace: str = ""

    def full_cause(self, host: str, note: str, oom_kills: int) -> str:
        """The cause, with what the supervisor itself knows of it. ``oom_kills``: processes that the out-of-memory killer
        ended on the host; ``note``: what the rank has said of itself.
        """
        return self.cause


@dataclass(frozen=True)
class Died(Report):
    """A rank whose connection has ended without a word."""

    cure: str = (
        "see the kernel's log there (dmesg) and the scheduler's: who ended it, and whether for its memory."
    )

    def full_cause(self, host: str, note: str, oom_kills: int) -> str:
        """With the number of processes that were out of memory."""
        if not oom_kills:
            return self.cause
        return f"{self.cause}\nThe kernel's out-of-memory killer ended {oom_kills} process(es) on {host} in this time."


@dataclass(frozen=True)
class Raised(Report):
    """An exception that nobody caught."""


@dataclass(frozen=True)
class Ended(Report):
    """The process has called for its own end, or was asked to end: SIGTERM, Ctrl-C."""


@dataclass(frozen=True)
class Left(Report):
    """A rank has ended in good order while another one needs it, which reports this."""

    weight: ClassVar[int] = 1

    def full_cause(self, host: str, note: str, oom_kills: int) -> str:
        """With what went wrong there before."""
        return f"{self.cause}\nBefore, it had: {note}" if note else self.cause


@dataclass(frozen=True)
class WaitFailed(Report):
    """A rank has waited for others in vain, or has lost its connection to them."""

    weight: ClassVar[int] = 2


@dataclass(frozen=True)
class Silent(Report):
    """No sign of life of a rank that another has waited for; the supervisor alone reports this."""


REPORTS: Mapping[str, type[Report]] = {
    "exception": Raised,
    "exit": Ended,
    "interrupt": Ended,
    "signal": Ended,
    "left": Left,
    "communication": WaitFailed,
}
"""What a rank may report, by the word that its message has."""


def read_phase(memory: mmap.mmap) -> str:
    """The text in a phase memory: its length in one byte, then its bytes."""
    start = COOKIE_BYTES + 1
    return memory[start : start + memory[COOKIE_BYTES]].decode(errors="replace")


def open_memory(pid: int, descriptor: int, cookie: bytes) -> mmap.mmap | None:
    """Map the phase memory of a process of this host; None if it cannot be reached (another container), or is
    something else.
    """
    if not 0 <= descriptor < 2**31:
        return None
    try:
        # Neither waits for the other end of a pipe, nor takes what is not memory.
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(own)
        if not stat.S_ISREG(status.st_mode) or status.st_size != PHASE_BYTES:
            return None
        memory = mmap.mmap(own, PHASE_BYTES, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(own)
    return memory if memory[:COOKIE_BYTES] == cookie else None
