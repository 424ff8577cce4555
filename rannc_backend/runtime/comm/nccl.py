"""Tensors between CUDA devices over NCCL: every operation is queued, and the host never waits.

In: tensors of the compute stream, peers, routes, groups of ranks. Out: works whose `wait` makes the compute
stream wait. Terms: as in `streams` and `lent_buffers`; a *link* is a process group of its own with the stream
that its operations are queued on.

- Links are shared, since each costs memory of the device: one for all messages between the same ranks (of two
  stages, or of all ranks: input rows, output rows, parameters), one per group of ranks that reduces. NCCL
  runs the operations of one group one after the other (a group that reduces may have several links, which buckets
  go to one after the other). So within a step a message is not queued when it is
  posted but at its place in an order (`schedule/message_order.py`), where `reach` says so: both ends queue the same messages in
  the same order, and nothing is queued that needs what its own rank does later. Outside of steps messages are
  queued as they are posted: there all ranks go through the same list. All ranks make the same links in the
  same order.
- A send starts after what the compute stream had been given when it was posted, which ends with the kernel
  that made the message. A receive starts when its buffer is ready, whatever the compute stream is doing. Both
  are queued from the link's own stream. A reduction runs on its link's stream, after the gradients that it
  reduces.
- `Work.wait` is an event wait of the compute stream: of a receive before its first use, of a send where the
  program ends it (its memory is then given back in the order of the compute stream), of a reduction at the
  end of the step.
- No memory is handed to the allocator while another stream uses it: works keep their tensors until `wait`,
  receive buffers belong to the pool. Torch's point-to-point operations record their stream on the memory that
  they are given all the same, which would hold it back until the host sees their event; sends are therefore
  given an alias that the allocator does not know.
- The first operation of a group must be made by all its ranks, and the first message of a pair sets its
  connection up and waits for the other end on the host. So a new link begins with a ring over all its ranks,
  and `connect` does the same for all pairs that a step is about to use, in one batch per link, link by link
  in the same order on all ranks.
- Limits are kept by `DeviceWatch`, since no host wait could; the time-out of the groups stands behind it.
  Work that has failed counts as
  completed: it is asked for its exception first (`is_finished`), and `check` asks the latest of each link
  before ranks agree on anything.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rannc_backend.errors import CommunicationError
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.kernels.plain_memory import has_plain_memory
from rannc_backend.runtime.comm.device_watch import DeviceWatch
from rannc_backend.runtime.comm.gloo import DoneWork, OwnedGroups, reductions_name
from rannc_backend.runtime.comm.receive_buffers import ReceiveBuffers
from rannc_backend.runtime.comm.streams import DeviceLayer, Event, Stream, nccl_view, unrecorded_alias
from rannc_backend.runtime.torch_internals import is_finished
from rannc_backend.runtime.world import QueuedMessage, Ranks, Route

# The watch speaks first; the time-out of NCCL's own watchdog ends a process without a word on stage or
# micro-batch.
_TIMEOUT_FACTOR = 2.0


class Posted(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Make the current stream wait for it."""
        ...

    def is_completed(self) -> bool:
        """Whether the device has finished it, or it has failed."""
        ...

    def exception(self) -> BaseException | None:
        """Why it has failed."""
        ...


class NcclCalls:
    """What is asked of torch.distributed, so that tests can put something else in its place."""

    def new_group(self, ranks: Ranks, limit_seconds: float) -> Any:
        """A process group; None where this rank is not in it. All ranks of the job call it."""
        limit = datetime.timedelta(seconds=limit_seconds)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # Torch warns where it finds another time-out there than in its own argument.
        options._timeout = limit
        group = dist.new_group(list(ranks), timeout=limit, backend="nccl", pg_options=options)
        return None if dist.get_rank() not in ranks else group

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        group: Any,
    ) -> Posted:
        """Start messages to and from other ranks as one batch, after the current stream."""
        # A batch uses the group's own communicator also where torch would make one for the pair.
        operations = [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in receives]
        (work,) = dist.batch_isend_irecv(operations)
        return work

    # Collectives are asynchronous: of a synchronous one torch 2.8 and newer give no work, and what has no work
    # cannot be asked whether it has failed.

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Posted:
        """Start a sum over the group, after the current stream."""
        return _posted(dist.all_reduce(_real(tensor), group=group, async_op=True))

    def reduce(self, tensor: torch.Tensor, root: int, group: Any) -> Posted:
        """Start a sum over the group, for its root alone, after the current stream."""
        return _posted(dist.reduce(_real(tensor), root, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, root: int, group: Any) -> Posted:
        """Start a copy of the root's tensor, after the current stream."""
        return _posted(dist.broadcast(tensor, root, group=group, async_op=True))


def _posted(work: Any) -> Posted:
    assert work is not None, "a rank that is not in the group has no part in its operations"
    return work


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: NCCL knows none."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(slots=True, eq=False)
class _Link:
    """A process group and the stream on which this rank queues its operations; both None where this rank has
    no part.
    """

    name: str
    ranks: Ranks
    group: Any
    stream: Stream | None
    connected: set[tuple[int, bool]] = field(
        default_factory=set
    )  # peers of this rank, and whether it sends to them
    latest: Posted | None = None
    peers: Ranks = ()  # the others of its ranks
    where: str = ""  # in words


class _Way(NamedTuple):
    """Whose link the messages of a channel to or from one peer take, and what they are in words."""

    ranks: Ranks
    send: str
    receive: str

    @classmethod
    def of(cls, channel: str, ranks: Ranks) -> _Way:
        return cls(ranks, f"send of {channel!r}", f"receive of {channel!r}")


class MessageWork:
    """A message; keeps its tensor until the compute stream waits for it.

    ``ready``: the event after which the device may start it.
    """

    __slots__ = ("is_send", "link", "peer", "posted", "ready", "tensor", "what")

    def __init__(
        self, tensor: torch.Tensor, link: _Link, peer: int, what: str, *, is_send: bool, ready: Event
    ) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.link, self.peer, self.what, self.is_send, self.ready = link, peer, what, is_send, ready
        self.posted: Posted | None = None

    def wait(self, limit_seconds: float | None = None) -> None:
        if self.tensor is not None:
            assert self.posted is not None, f"{self.what} is waited for before it is queued"
            self.posted.wait()
        self.posted = self.tensor = None


class EventWork:
    """An operation on a link's own stream; keeps its tensor until the compute stream waits for it."""

    __slots__ = ("_event", "_layer", "_tensor")

    def __init__(self, event: Event, tensor: torch.Tensor, layer: DeviceLayer) -> None:
        self._event: Event | None = event
        self._tensor: torch.Tensor | None = tensor
        self._layer = layer

    def wait(self, limit_seconds: float | None = None) -> None:
        if self._event is not None:
            self._layer.compute().wait_event(self._event)
        self._event = self._tensor = None


class NcclTransport:
    """Transport of a rank with a device of its own.

    Args:
        layer: streams and memory of the device.
        limit_seconds: time after which a message or reduction that does not move ends the job.
        watch: notices those that do not move.
        calls: torch.distributed.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        limit_seconds: float,
        layer: DeviceLayer,
        calls: NcclCalls,
        watch: DeviceWatch,
        groups: OwnedGroups,
    ) -> None:
        self.rank = rank
        self.limit_seconds = limit_seconds
        self.buffers = ReceiveBuffers(layer)
        self.created: list[str] = []  # names of the links in the order in which they were made
        self._everyone = tuple(range(size))
        self._layer = layer
        self._calls = calls
        self._watch = watch
        self._groups = groups
        # By channel and peer: models that this process trains may have stages of one number on other ranks.
        self._ways: dict[tuple[str, int], _Way] = {}
        self._messages: dict[Ranks, _Link] = {}
        self._reductions: dict[tuple[Ranks, int], _Link] = {}  # by communicator
        self._queue_order: Sequence[QueuedMessage] = ()
        self._next_queued = 0
        self._held: dict[
            tuple[str, int, bool], deque[MessageWork | None]
        ] = {}  # posted, not queued; None: nothing to send

    def limit_waits(self, seconds: float) -> None:
        self.limit_seconds = seconds
        self._watch.limit_waits(seconds)

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        everywhere = [Route(channel, self._everyone, self._everyone) for channel in channels]
        for route in (*everywhere, *routes):
            ranks = route.ranks
            # Both ends of a pair go through the same list, so the first link that is right for one is for both.
            for peer in route.peers_of(self.rank):
                self._ways.setdefault((route.channel, peer), _Way.of(route.channel, ranks))
            if len(ranks) > 1 and ranks not in self._messages:
                self._messages[ranks] = self._new_link(f"messages of {ranks}", ranks)
        for ranks in groups:
            assert list(ranks) == sorted(set(ranks)), f"group {ranks} is not in ascending order"
            for number in range(num_communicators if len(ranks) > 1 else 0):
                if (ranks, number) not in self._reductions:
                    self._reductions[ranks, number] = self._new_link(reductions_name(ranks, number), ranks)

    def connect(self, pairs: Iterable[tuple[str, int, int]]) -> None:
        wanted: dict[Ranks, set[tuple[int, bool]]] = {}
        for channel, source, destination in pairs:
            if self.rank in (source, destination) and source != destination:
                peer = (destination, True) if source == self.rank else (source, False)
                wanted.setdefault(self._ways[channel, peer[0]].ranks, set()).add(peer)
        for ranks, link in self._messages.items():
            new = wanted.get(ranks, set()) - link.connected
            if new:
                self._set_up(link, sorted(new))

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> MessageWork | DoneWork:
        link = self._link_of(tensor, peer, channel)
        if tensor.numel() == 0:
            return self._nothing(channel, peer, is_send=True)
        ready, what = self._layer.compute().record_event(), self._ways[channel, peer].send
        return self._post(MessageWork(tensor, link, peer, what, is_send=True, ready=ready), channel)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> MessageWork | DoneWork:
        link = self._link_of(tensor, peer, channel)
        if tensor.numel() == 0:
            return self._nothing(channel, peer, is_send=False)
        # Memory that is not the pool's may be in use by anything that is queued.
        ready = self.buffers.ready_of(tensor) or self._layer.compute().record_event()
        what = self._ways[channel, peer].receive
        return self._post(MessageWork(tensor, link, peer, what, is_send=False, ready=ready), channel)

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> EventWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        link = self._reductions[ranks, communicator]
        if len(takers) != 1:
            return self._sum(link, tensor)
        root = takers[0]
        return self._start(link, tensor, f"sum for rank {root}", self._calls.reduce, tensor, root)

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: Ranks) -> EventWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        link = self._reductions[ranks, 0]
        what = f"broadcast from rank {root}"
        return self._start(link, tensor, what, self._calls.broadcast, nccl_view(tensor), root)

    def share(self, groups: Sequence[Ranks]) -> None:
        self.prepare(groups=groups)  # NCCL finds the way between devices of a host itself

    def acquire(self, num_bytes: int) -> torch.Tensor:
        return self.buffers.take(num_bytes)

    def acquire_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.buffers.take_message(layout)

    def after_compute(self) -> None:
        self.buffers.after_compute()

    def begin_step(self, queued: Sequence[QueuedMessage] = ()) -> None:
        self.buffers.begin_step()
        self._held.clear()
        self._queue_order, self._next_queued = queued, 0

    def reach(self, place: int) -> None:
        while (
            self._next_queued < len(self._queue_order) and self._queue_order[self._next_queued].place <= place
        ):
            message = self._queue_order[self._next_queued]
            self._next_queued += 1
            held = self._held.get((message.channel, message.peer, message.is_send))
            assert held, f"rank {self.rank} has not posted {message} before it is to be queued"
            work = held.popleft()
            if work is not None:
                self._queue(work)

    def check(self) -> None:
        self._watch.raise_failure()
        for link in [*self._messages.values(), *self._reductions.values()]:
            if link.latest is not None:
                try:
                    is_finished(link.latest)
                except RuntimeError as error:
                    raise CommunicationError(f"{link.name} broke: {error}", rank=self.rank) from error

    def recreate(self) -> None:
        self.check()  # what has broken ends the job; only what is whole is made anew
        messages, reductions = self._messages, self._reductions
        self._messages, self._reductions = {}, {}
        self._groups.destroy()
        for ranks, link in messages.items():
            self._messages[ranks] = self._new_link(link.name, ranks)
            if link.connected - self._messages[ranks].connected:
                self._set_up(self._messages[ranks], sorted(link.connected - self._messages[ranks].connected))
        for ranks, number in reductions:
            self.prepare(groups=[ranks], num_communicators=number + 1)

    def close(self) -> None:
        self._watch.close()
        self._messages.clear()
        self._reductions.clear()
        self._groups.close()

    def _nothing(self, channel: str, peer: int, *, is_send: bool) -> DoneWork:
        if self._next_queued < len(self._queue_order):
            self._held.setdefault((channel, peer, is_send), deque()).append(None)
        return DoneWork()

    def _post(self, work: MessageWork, channel: str) -> MessageWork:
        if self._next_queued < len(self._queue_order):
            self._held.setdefault((channel, work.peer, work.is_send), deque()).append(work)
        else:
            self._queue(work)
        return work

    def _queue(self, work: MessageWork) -> None:
        link, tensor = work.link, work.tensor
        assert link.stream is not None and tensor is not None, f"rank {self.rank} has no part in {work.what}"
        link.stream.wait_event(work.ready)
        with self._layer.on(link.stream):
            if work.is_send:
                posted = self._calls.exchange([(unrecorded_alias(tensor), work.peer)], [], link.group)
            else:
                posted = self._calls.exchange([], [(nccl_view(tensor), work.peer)], link.group)
        work.posted = link.latest = posted
        self._watch.add(partial(is_finished, posted), (work.peer,), work.what)

    def _sum(self, link: _Link, tensor: torch.Tensor) -> EventWork:
        return self._start(link, tensor, "all-reduce", self._calls.all_reduce, tensor)

    def _start(
        self, link: _Link, tensor: torch.Tensor, what: str, queue: Callable[..., Posted], *args: Any
    ) -> EventWork:
        """Queue a collective, ``queue(*args, group)``, behind what is computed now. It keeps ``tensor``."""
        assert link.stream is not None, f"rank {self.rank} is not in {link.ranks}"
        link.stream.wait_event(self._layer.compute().record_event())
        with self._layer.on(link.stream):
            posted = queue(*args, link.group)
            posted.wait()  # the link's stream; the host does not
            done = link.stream.record_event()
        link.latest = posted
        self._watch.add(partial(is_finished, posted), link.peers, f"{what} {link.where}")
        return EventWork(done, tensor, self._layer)

    def _new_link(self, name: str, ranks: Ranks) -> _Link:
        self.created.append(name)
        group = self._groups.add(self._calls.new_group(ranks, self.limit_seconds * _TIMEOUT_FACTOR))
        link = _Link(name, ranks, group, self._layer.new_stream() if self.rank in ranks else None)
        if self.rank not in ranks:
            return link
        link.peers = tuple(rank for rank in ranks if rank != self.rank)
        link.where = f"over ranks {list(ranks)}"
        if name.startswith("reductions"):
            self._sum(link, self._layer.empty(4).zero_()).wait()
        else:
            place = ranks.index(self.rank)
            self._set_up(link, [(ranks[(place + 1) % len(ranks)], True), (ranks[place - 1], False)])
        return link

    def _set_up(self, link: _Link, peers: Sequence[tuple[int, bool]]) -> None:
        """Set up the connections to and from peers of this rank; both ends do so at once."""
        sends = [(self._layer.empty(1).zero_(), peer) for peer, is_send in peers if is_send]
        receives = [(self._layer.empty(1), peer) for peer, is_send in peers if not is_send]
        self._calls.exchange(sends, receives, link.group).wait()
        link.connected.update(peers)

    def _link_of(self, tensor: torch.Tensor, peer: int, channel: str) -> _Link:
        assert peer != self.rank, f"message {channel!r} of rank {peer} to itself"
        way = self._ways.get((channel, peer))
        assert way is not None, f"channel {channel!r} was not prepared between ranks {self.rank} and {peer}"
        assert has_plain_memory(tensor), (
            f"message {channel!r} is not contiguous, or is marked as conjugate or negative"
        )
        return self._messages[way.ranks]
