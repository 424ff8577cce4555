"""Tensors between CUDA devices over NCCL: every operation is queued, and the host never waits.

In: tensors of the compute stream, peers, routes, groups of ranks. Out: works whose `wait` makes the compute stream wait. Terms: as in
`streams` and `lent_buffers`; a *link* is a process group of its own with the stream that its operations are queued on.

- One link per route (a channel with its ranks), one per group of ranks that reduces. NCCL runs the operations of one group one after
  the other, so two directions that shared a group would wait for each other. Where ranks both send and receive on a channel (input
  rows, between the replicas of a stage), it has a link for each destination, or for each source where those are fewer: then no rank
  does both on one link, and since all post in the order of micro-batches and ranks, no circle of waits can close. All ranks make the same
  links in the same order.
- A send starts after what the compute stream had been given when it was posted, which ends with the kernel that made the message. A
  receive is posted from its link's own stream and starts when its buffer is ready, whatever the compute stream is doing. A reduction
  runs on its link's stream, after the gradients that it reduces.
- `Work.wait` is an event wait of the compute stream: of a receive before its first use, of a send where the program ends it (its memory
  is then given back in the order of the compute stream), of a reduction at the end of the step.
- No memory is handed to the allocator while another stream uses it: works keep their tensors until `wait`, receive buffers belong to
  the pool. Torch's point-to-point operations record their stream on the memory that they are given all the same, which would hold it back
  until the host sees their event; sends are therefore given an alias that the allocator does not know.
- The first message of a pair sets its connection up and waits for the other end on the host. `prepare` does that for all pairs of a
  route in one batch, link by link in the same order on all ranks, so that no later post can wait.
- Limits are kept by `DeviceWatch`, since no host wait could; the time-out of the groups stands behind it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rannc_backend.kernels.plain_memory import has_plain_memory
from rannc_backend.runtime.device_watch import DeviceWatch
from rannc_backend.runtime.lent_buffers import ReceiveBuffers
from rannc_backend.runtime.streams import DeviceLayer, Event, Stream, byte_view, unrecorded_alias
from rannc_backend.runtime.transport import DoneWork, OwnedGroups
from rannc_backend.runtime.world import Ranks, Route

# The watch speaks first; the time-out of NCCL's own watchdog ends a process without a word on stage or micro-batch.
_TIMEOUT_FACTOR = 2.0


class Posted(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Make the current stream wait for it."""
        ...

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
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

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], group: Any) -> Posted:
        """Start messages to and from other ranks as one batch, after the current stream."""
        # A batch uses the group's own communicator also where torch would make one for the pair.
        operations = [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in receives]
        (work,) = dist.batch_isend_irecv(operations)
        return work

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> None:
        """Queue a sum over the group on the current stream."""
        dist.all_reduce(tensor, group=group, async_op=False)

    def broadcast(self, tensor: torch.Tensor, root: int, group: Any) -> None:
        """Queue a copy of the root's tensor on the current stream."""
        dist.broadcast(tensor, src=root, group=group, async_op=False)


@dataclass(frozen=True, slots=True)
class _Link:
    """A process group and the stream on which this rank queues its operations; both None where this rank has no part."""

    ranks: Ranks
    group: Any
    stream: Stream | None


@dataclass(frozen=True, slots=True)
class _Links:
    """The links of one channel: one, or one for each rank at one of its ends (``split``: "", "source" or "destination")."""

    split: str
    by_pivot: dict[int | None, _Link]

    def of(self, source: int, destination: int) -> _Link:
        """The link of a message."""
        return self.by_pivot[{"": None, "source": source, "destination": destination}[self.split]]


def split_by(route: Route) -> str:
    """The end by which a channel must be split so that no rank both sends and receives on one link; "" where none does."""
    sends = {s for s in route.sources if any(d != s for d in route.destinations)}
    receives = {d for d in route.destinations if any(s != d for s in route.sources)}
    if not sends & receives:
        return ""
    return "destination" if len(route.destinations) <= len(route.sources) else "source"


def parts_of(route: Route, split: str) -> list[tuple[int | None, Route]]:
    """The parts of a split route, with the rank that each is for; those in which nobody has anybody to talk to are left out."""
    if split == "destination":
        parts = [(rank, Route(route.channel, route.sources, (rank,))) for rank in route.destinations]
    elif split == "source":
        parts = [(rank, Route(route.channel, (rank,), route.destinations)) for rank in route.sources]
    else:
        return [(None, route)]
    return [(pivot, part) for pivot, part in parts if len(part.ranks) > 1]


class StreamWork:
    """A message; keeps its tensor until the compute stream waits for it."""

    __slots__ = ("_posted", "_tensor")

    def __init__(self, posted: Posted, tensor: torch.Tensor) -> None:
        self._posted: Posted | None = posted
        self._tensor: torch.Tensor | None = tensor

    def wait(self, limit_seconds: float | None = None) -> None:
        if self._posted is not None:
            self._posted.wait()
        self._posted = self._tensor = None


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
        self._routes: dict[str, _Links] = {}
        self._asked: dict[str, tuple[Route, bool]] = {}  # what the routes were made from
        self._reductions: dict[Ranks, _Link] = {}

    def limit_waits(self, seconds: float) -> None:
        self.limit_seconds = seconds
        self._watch.limit_waits(seconds)

    def prepare(self, *, channels: Sequence[str] = (), groups: Sequence[Ranks] = (), routes: Sequence[Route] = ()) -> None:
        for channel in channels:
            # Anybody may send to anybody, but most talk to rank 0, and a connection of every pair would cost memory.
            self._add_route(Route(channel, (0,), self._everyone), both=True)
        for route in routes:
            self._add_route(route, both=False)
        for ranks in groups:
            assert list(ranks) == sorted(set(ranks)), f"group {ranks} is not in ascending order"
            if len(ranks) > 1 and ranks not in self._reductions:
                self._reductions[ranks] = self._new_link(f"reductions of {ranks}", ranks)
                if self.rank in ranks:
                    self._queue(self._reductions[ranks], self._layer.empty(4).zero_(), "all-reduce", None).wait()

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> StreamWork | DoneWork:
        link = self._link_of(tensor, peer, channel, source=self.rank, destination=peer)
        if tensor.numel() == 0:
            return DoneWork()
        posted = self._calls.exchange([(unrecorded_alias(tensor), peer)], [], link.group)
        self._watch.add(posted.is_completed, (peer,), f"send of {channel!r}")
        return StreamWork(posted, tensor)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> StreamWork | DoneWork:
        link = self._link_of(tensor, peer, channel, source=peer, destination=self.rank)
        if tensor.numel() == 0:
            return DoneWork()
        assert link.stream is not None, f"rank {self.rank} has no part in {channel!r}"
        # Memory that is not the pool's may be in use by anything that is queued.
        link.stream.wait_event(self.buffers.ready_of(tensor) or self._layer.compute().record_event())
        with self._layer.on(link.stream):
            posted = self._calls.exchange([], [(byte_view(tensor), peer)], link.group)
        self._watch.add(posted.is_completed, (peer,), f"receive of {channel!r}")
        return StreamWork(posted, tensor)

    def allreduce(self, tensor: torch.Tensor, ranks: Ranks) -> EventWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        return self._queue(self._reductions[ranks], tensor, "all-reduce", None)

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: Ranks) -> EventWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        return self._queue(self._reductions[ranks], tensor, f"broadcast from rank {root}", root)

    def share(self, groups: Sequence[Ranks]) -> None:
        self.prepare(groups=groups)  # NCCL finds the way between devices of a host itself

    def lend(self, num_bytes: int) -> torch.Tensor:
        return self.buffers.take(num_bytes)

    def after_compute(self) -> None:
        self.buffers.after_compute()

    def begin_step(self) -> None:
        self.buffers.begin_step()

    def recreate(self) -> None:
        groups, asked = list(self._reductions), list(self._asked.values())
        self._routes.clear()
        self._reductions.clear()
        self._groups.destroy()
        for route, both in asked:
            self._add_route(route, both=both)
        self.prepare(groups=groups)

    def close(self) -> None:
        self._watch.close()
        self._routes.clear()
        self._reductions.clear()
        self._groups.close()

    def _queue(self, link: _Link, tensor: torch.Tensor, what: str, root: int | None) -> EventWork:
        assert link.stream is not None, f"rank {self.rank} is not in {link.ranks}"
        link.stream.wait_event(self._layer.compute().record_event())
        with self._layer.on(link.stream):
            if root is None:
                self._calls.all_reduce(tensor, link.group)
            else:
                self._calls.broadcast(byte_view(tensor), root, link.group)
            done = link.stream.record_event()
        peers = tuple(rank for rank in link.ranks if rank != self.rank)
        self._watch.add(done.query, peers, f"{what} over ranks {list(link.ranks)}")
        return EventWork(done, tensor, self._layer)

    def _add_route(self, route: Route, *, both: bool) -> None:
        if route.channel not in self._routes and len(route.ranks) > 1:
            self._asked[route.channel] = route, both
            split = "" if both else split_by(route)
            by_pivot: dict[int | None, _Link] = {}
            for pivot, part in parts_of(route, split):
                name = f"route {route.channel}" + ("" if pivot is None else f" by {split} {pivot}")
                by_pivot[pivot] = self._new_link(name, part.ranks)
                self._connect(by_pivot[pivot], part, both=both)
            self._routes[route.channel] = _Links(split, by_pivot)

    def _new_link(self, name: str, ranks: Ranks) -> _Link:
        self.created.append(name)
        group = self._groups.add(self._calls.new_group(ranks, self.limit_seconds * _TIMEOUT_FACTOR))
        return _Link(ranks, group, self._layer.new_stream() if self.rank in ranks else None)

    def _connect(self, link: _Link, route: Route, *, both: bool) -> None:
        """Set up the connections between sources and destinations of a route; ``both``: in both directions."""
        if link.stream is None:
            return
        pairs = [(source, destination) for source in route.sources for destination in route.destinations if source != destination]
        pairs += [(destination, source) for source, destination in pairs] if both else []
        sends = [(self._layer.empty(1).zero_(), peer) for source, peer in pairs if source == self.rank]
        receives = [(self._layer.empty(1), peer) for peer, destination in pairs if destination == self.rank]
        self._calls.exchange(sends, receives, link.group).wait()

    def _link_of(self, tensor: torch.Tensor, peer: int, channel: str, *, source: int, destination: int) -> _Link:
        assert peer != self.rank, f"message {channel!r} of rank {peer} to itself"
        assert channel in self._routes, f"channel {channel!r} was not prepared"
        assert has_plain_memory(tensor), f"message {channel!r} is not contiguous, or is marked as conjugate or negative"
        return self._routes[channel].of(source, destination)

