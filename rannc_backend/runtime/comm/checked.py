"""A transport that is looked at: the options validate_comm and display_comm_value.

In: a transport. Out: one that does the same. With checks, a *note* follows every message on its channel: the
message's CRC-32, its size and its number, which the receiver compares; a difference is a `CommunicationError`
that names the channel, the peer and the message. With display, every message and reduction is logged, on
every rank. Both make a step wait where it would not.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from rannc_backend.errors import CommunicationError
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.world import BucketSums, QueuedMessage, Ranks, Route, Transport, Work, World
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

_NOTE_BYTES = 24  # three numbers of 8


def watch_transport(world: World, config: Config) -> World:
    """The world with its transport looked at, where the options ask for it. Alike on all ranks."""
    if world.size == 1 or not (config.validate_comm or config.display_comm_value):
        return world
    if config.display_comm_value:
        logger.setLevel(logging.INFO)  # on every rank, whatever the others are silent about
    watched = WatchedTransport(
        inner=world.transport,
        rank=world.rank,
        checks=config.validate_comm,
        displays=config.display_comm_value,
    )
    return replace(world, transport=watched)


def describe_values(tensor: torch.Tensor) -> str:
    """A tensor in a line: dtype, shape, least, mean and largest value."""
    head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.numel() == 0 or tensor.dtype == torch.uint8:  # bytes are several values in one message
        return head
    values = tensor.detach().abs().double() if tensor.is_complex() else tensor.detach().double()
    return f"{head}: least {values.min().item():.6g}, mean {values.mean().item():.6g}, largest {values.max().item():.6g}"


@dataclass(slots=True, kw_only=True)
class WatchedTransport:
    """See the module docstring; as `Transport`."""

    inner: Transport
    rank: int
    checks: bool
    displays: bool
    _num_sent: Counter[tuple[int, str]] = field(default_factory=Counter)
    _num_received: Counter[tuple[int, str]] = field(default_factory=Counter)

    def limit_waits(self, seconds: float) -> None:
        self.inner.limit_waits(seconds)

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        self.inner.prepare(
            channels=channels, groups=groups, routes=routes, num_communicators=num_communicators
        )

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        number = self._num_sent[peer, channel]
        self._num_sent[peer, channel] += 1
        if self.displays:
            logger.info(
                "rank %d sends %s number %d to rank %d: %s",
                self.rank,
                channel,
                number,
                peer,
                describe_values(tensor),
            )
        work = self.inner.isend(tensor, peer, channel)
        if not self.checks:
            return work
        note = torch.tensor(_note(tensor, number), dtype=torch.int64, device=tensor.device)
        return _SentWithNote(work, self.inner.isend(note, peer, channel))

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        number = self._num_received[peer, channel]
        self._num_received[peer, channel] += 1
        work = self.inner.irecv(tensor, peer, channel)
        note = None
        if self.checks:
            note = self.inner.acquire(_NOTE_BYTES).view(torch.int64)
        note_work = None if note is None else self.inner.irecv(note, peer, channel)
        return _Receipt(
            transport=self,
            work=work,
            tensor=tensor,
            note=note,
            note_work=note_work,
            peer=peer,
            channel=channel,
            number=number,
        )

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> Work:
        if self.displays:
            logger.info(
                "rank %d adds to the all-reduce over ranks %s: %s",
                self.rank,
                list(ranks),
                describe_values(tensor),
            )
        return self.inner.allreduce(tensor, ranks, takers, communicator)

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> Work:
        return self.inner.broadcast(tensor, root, ranks)

    def share(self, groups: Sequence[Ranks]) -> BucketSums | None:
        if not self.displays:
            return self.inner.share(groups)
        self.inner.prepare(groups=groups)
        return None

    def acquire(self, num_bytes: int) -> torch.Tensor:
        return self.inner.acquire(num_bytes)

    def acquire_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.inner.acquire_message(layout)

    def after_compute(self) -> None:
        self.inner.after_compute()

    def connect(self, pairs: Iterable[tuple[str, int, int]]) -> None:
        self.inner.connect(pairs)

    def begin_step(self, queued: Sequence[QueuedMessage] = ()) -> None:
        self.inner.begin_step([message for message in queued for _ in range(1 + self.checks)])

    def reach(self, place: int) -> None:
        self.inner.reach(place)

    def check(self) -> None:
        self.inner.check()

    def recreate(self) -> None:
        self.inner.recreate()

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True)
class _SentWithNote:
    message: Work
    note: Work

    def wait(self, limit_seconds: float | None = None) -> None:
        self.message.wait(limit_seconds)
        self.note.wait(limit_seconds)


@dataclass(slots=True, kw_only=True)
class _Receipt:
    """A message under way; looked at when it has arrived, once."""

    transport: WatchedTransport
    work: Work
    tensor: torch.Tensor | None
    note: torch.Tensor | None
    note_work: Work | None
    peer: int
    channel: str
    number: int

    def wait(self, limit_seconds: float | None = None) -> None:
        self.work.wait(limit_seconds)
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            return
        rank = self.transport.rank
        if self.note is not None and self.note_work is not None:
            self.note_work.wait(limit_seconds)
            expected, found = self.note.tolist(), _note(tensor, self.number)
            if expected != found:
                raise CommunicationError(
                    f"message {self.number} of {self.channel!r} is not what was sent: (CRC-32, bytes, "
                    f"number) {tuple(found)} arrived, {tuple(expected)} was sent",
                    rank=rank,
                    peer=self.peer,
                    cure="run `rannc doctor` on these hosts, and report the plan and the program "
                    "(print_program).",
                )
        if self.transport.displays:
            values = describe_values(tensor)
            logger.info(
                "rank %d has %s number %d of rank %d: %s", rank, self.channel, self.number, self.peer, values
            )


def _note(tensor: torch.Tensor, number: int) -> list[int]:
    content = plain_memory(tensor.detach()).view(-1).view(torch.uint8).cpu().numpy()
    return [zlib.crc32(content.data), content.size, number]
