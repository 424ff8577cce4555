"""Tensors between ranks over gloo, and the control wire for jobs without MPI. Over NCCL: `transport_nccl`.

In: contiguous tensors, peers, channel names, groups of ranks. Out: `Work` objects, to be waited for.
Terms: gloo tells messages of one pair apart by a *tag*, one per channel.

Facts about gloo that shape this file: a message whose Work is dropped is lost; `is_completed()` of a message
stays False until `wait()`; a `wait` that expires breaks the connection; a send does not complete before its
receive is posted.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rannc_backend.errors import CommunicationError
from rannc_backend.kernels.kept_views import new_message
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.kernels.plain_memory import has_plain_memory
from rannc_backend.runtime.comm.shared_memory_allreduce import SharedSums
from rannc_backend.runtime.comm.streams import byte_view
from rannc_backend.runtime.world import QueuedMessage, Ranks, Route

UNLIMITED = datetime.timedelta(days=7)
# Tags 0 to 15 are left to others on the same group.
_FIRST_TAG = 16


class WaitWatch(Protocol):
    """Is told for whom this rank waits, so that a wait for a rank that has left does not last until its
    limit.
    """

    def begin_wait(self, ranks: tuple[int, ...]) -> None: ...

    def end_wait(self) -> None: ...


def reductions_name(ranks: Ranks, communicator: int) -> str:
    """Of a group that sums, in messages: its ranks, and which of its communicators."""
    return f"reductions of {ranks}{f', communicator {communicator}' if communicator else ''}"


class DoneWork:
    """Nothing to wait for: an empty tensor, or a group of one."""

    def is_completed(self) -> bool:
        return True

    def wait(self, limit_seconds: float | None = None) -> None:
        return


class DistWork:
    """A torch.distributed Work with what it must keep alive and what to say when it fails.

    Args:
        peers: the ranks whose part this waits for.
        after: to be called when the tensor has arrived, or may be overwritten.
    """

    __slots__ = ("_after", "_peers", "_tensor", "_transport", "_what", "_work")

    def __init__(
        self,
        transport: GroupTransport,
        work: Any,
        tensor: torch.Tensor,
        *,
        peers: tuple[int, ...],
        what: str,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._work = work
        self._tensor: torch.Tensor | None = tensor
        self._peers = peers
        self._what = what
        self._after = after

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. For collectives only: gloo says False of a message until it is
        waited for.
        """
        return self._work is None or bool(self._work.is_completed())

    def wait(self, limit_seconds: float | None = None) -> None:
        if self._work is None:
            return
        self._wait_on_host(self._transport.limit_seconds if limit_seconds is None else limit_seconds)
        if self._after is not None:
            self._after()
        self._work = self._tensor = self._after = None

    def _wait_on_host(self, limit_seconds: float) -> None:
        self._transport.before_wait()
        watch = self._transport.watch
        watch.begin_wait(self._peers)
        try:
            self._work.wait(datetime.timedelta(seconds=limit_seconds))
        except RuntimeError as error:
            raise self._failure(error, limit_seconds) from error
        watch.end_wait()

    def _failure(self, error: RuntimeError, limit_seconds: float) -> CommunicationError:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        rank = self._transport.rank
        peer = self._peers[0] if len(self._peers) == 1 else None
        if "timed out" in text.lower() or "timeout" in text.lower():
            problem = f"{self._what} did not complete in time"
            return CommunicationError(problem, rank=rank, peer=peer, limit_seconds=limit_seconds)
        return CommunicationError(f"{self._what} broke: {text}", rank=rank, peer=peer)


class Memory:
    """What transports have in common whose host waits for every message: received tensors lie in fresh
    memory, and the order of messages does not matter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def acquire(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def acquire_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        message, *views = new_message(self.acquire(layout.num_bytes), layout)
        return message, views

    def after_compute(self) -> None:
        return

    def begin_step(self, queued: Sequence[QueuedMessage] = ()) -> None:
        return

    def reach(self, place: int) -> None:
        return

    def connect(self, pairs: Iterable[tuple[str, int, int]]) -> None:
        return

    def check(self) -> None:
        return


class SingleTransport(Memory):
    """Transport of a job of one process."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))

    def limit_waits(self, seconds: float) -> None:
        return

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        return

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        raise AssertionError(f"message {channel!r} to rank {peer} in a job of one process")

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        raise AssertionError(f"message {channel!r} from rank {peer} in a job of one process")

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> DoneWork:
        return DoneWork()

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: Ranks) -> DoneWork:
        return DoneWork()

    def share(self, groups: Sequence[Ranks]) -> None:
        return

    def recreate(self) -> None:
        return

    def close(self) -> None:
        return


class OwnedGroups:
    """The process groups that a transport has made, so that the user's collectives cannot meet ours, and
    their end.

    Args:
        owns_default_group: torch.distributed was started by us, and ends with us.
    """

    def __init__(self, *, owns_default_group: bool) -> None:
        self._owns_default_group = owns_default_group
        self._groups: list[Any] = []

    def add(self, group: Any) -> Any:
        """Take charge of a group; None, for a rank that is not in it, is allowed. Gives it back."""
        if group is not None:
            self._groups.append(group)
        return group

    def destroy(self) -> None:
        """End the groups, and let others be made. All ranks call it."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def close(self) -> None:
        # gloo's threads hold the last tensors of a group; a group that outlives the interpreter aborts the
        # process when they let go. So everything goes now: groups, our references, and then whatever the
        # collector finds.
        if dist.is_initialized():
            if self._owns_default_group:
                dist.destroy_process_group()
            else:
                for group in self._groups:
                    dist.destroy_process_group(group)
        self._groups.clear()
        gc.collect()


class GroupTransport(Memory):
    """Transport of CPU tensors over gloo groups.

    Args:
        limit_seconds: longest wait where `wait` gives none.
        message_group: group of all ranks for messages, made by bootstrap.
        watch: the monitor.
        places: of every rank, see `shared_memory.place`; empty where ranks share no memory.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        limit_seconds: float,
        message_group: Any,
        groups: OwnedGroups,
        watch: WaitWatch,
        places: tuple[str, ...] = (),
    ) -> None:
        super().__init__(device)
        self.rank = rank
        self.limit_seconds = limit_seconds
        self.watch = watch
        self.created: list[str] = []  # names of groups and channels in the order in which they were made
        self._message_group = groups.add(message_group)
        self._groups = groups
        self._tags: dict[str, int] = {}
        self._reductions: dict[tuple[Ranks, int], Any] = {}  # by communicator
        self._answers: dict[Ranks, Any] = {}
        self._sums = SharedSums(rank=rank, places=places, plain=self.allreduce) if places else None

    def limit_waits(self, seconds: float) -> None:
        self.limit_seconds = seconds

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        for channel in [*channels, *(route.channel for route in routes)]:
            if channel not in self._tags:
                self.created.append(f"route {channel}")
                self._tags[channel] = _FIRST_TAG + len(self._tags)
        for ranks in groups:
            assert list(ranks) == sorted(set(ranks)), f"group {ranks} is not in ascending order"
            for number in range(num_communicators if len(ranks) > 1 else 0):
                if (ranks, number) not in self._reductions:
                    self.created.append(reductions_name(ranks, number))
                    self._reductions[ranks, number] = self._new_group(ranks)

    def share(self, groups: Sequence[Ranks]) -> SharedSums | None:
        self.prepare(groups=groups)
        if self._sums is None:
            return None
        for ranks in groups:
            if self._sums.possible(ranks) and ranks not in self._answers:
                self.created.append(f"sums in shared memory of {ranks}")
                self._answers[ranks] = self._new_group(ranks)
                if self.rank in ranks:
                    self._sums.add(
                        ranks,
                        announce=self._starter(self._reductions[ranks, 0], ranks),
                        answer=self._starter(self._answers[ranks], ranks),
                    )
        return self._sums

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        return DistWork(
            self, self._start_send(tensor, peer, channel), tensor, peers=(peer,), what=f"send of {channel!r}"
        )

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        return DistWork(
            self,
            self._start_receive(tensor, peer, channel),
            tensor,
            peers=(peer,),
            what=f"receive of {channel!r}",
        )

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> DistWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        return self._start_sum(tensor, self._reductions[ranks, communicator], ranks, takers)

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: Ranks) -> DistWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        assert has_plain_memory(tensor), (
            "what is broadcast is not contiguous, or is marked as conjugate or negative"
        )
        work = dist.broadcast(tensor, src=root, group=self._reductions[ranks, 0], async_op=True)
        what = f"broadcast from rank {root} over ranks {list(ranks)}"
        return DistWork(self, work, tensor, peers=(root,), what=what)

    def before_wait(self) -> None:
        """This rank is about to wait on the host."""
        return

    def recreate(self) -> None:
        reductions, shared = list(self._reductions), list(self._answers)
        self._forget_groups()
        self._message_group = None
        self._groups.destroy()
        self._message_group = self._groups.add(dist.new_group(backend="gloo", timeout=UNLIMITED))
        for ranks, number in reductions:
            self.prepare(groups=[ranks], num_communicators=number + 1)
        self.share(shared)

    def close(self) -> None:
        self._forget_groups()
        self._tags.clear()
        self._message_group = None
        self._groups.close()

    def _forget_groups(self) -> None:
        self._reductions.clear()
        self._answers.clear()
        if self._sums is not None:
            self._sums.clear()

    def _new_group(self, ranks: Ranks) -> Any:
        # gloo's own limit is beyond any that `wait` gives.
        group = dist.new_group(list(ranks), timeout=UNLIMITED, backend="gloo")
        return self._groups.add(group if self.rank in ranks else None)

    def _starter(self, group: Any, ranks: Ranks) -> Callable[[torch.Tensor], DistWork]:
        return lambda tensor: self._start_sum(tensor, group, ranks)

    def _start_sum(self, tensor: torch.Tensor, group: Any, ranks: Ranks, takers: Ranks = ()) -> DistWork:
        assert has_plain_memory(tensor), (
            "what is reduced is not contiguous, or is marked as conjugate or negative"
        )
        if len(takers) == 1:
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            work = dist.reduce(flat, dst=takers[0], group=group, async_op=True)
        else:
            work = dist.all_reduce(tensor, group=group, async_op=True)
        return DistWork(self, work, tensor, peers=ranks, what=f"all-reduce over ranks {list(ranks)}")

    def _start_send(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        return dist.isend(byte_view(tensor), dst=peer, group=self._message_group, tag=self._tags[channel])

    def _start_receive(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        return dist.irecv(byte_view(tensor), src=peer, group=self._message_group, tag=self._tags[channel])

    def _check_message(self, tensor: torch.Tensor, peer: int, channel: str) -> None:
        assert peer != self.rank, f"message {channel!r} of rank {peer} to itself"
        assert channel in self._tags, f"channel {channel!r} was not prepared"
        assert has_plain_memory(tensor), (
            f"message {channel!r} is not contiguous, or is marked as conjugate or negative"
        )


class GroupPending:
    """A gloo collective of bytes under way."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def test(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._finish is not None:
            self._work.wait()
            self._finish()
            self._finish = None
        return True


class GroupWire:
    """The control wire of a job without MPI: byte collectives over a gloo group of all ranks."""

    def __init__(self, group: Any, *, size: int) -> None:
        self._group = group
        self._size = size

    def start_allgather(self, send: bytearray, receive: bytearray) -> GroupPending:
        own = torch.frombuffer(send, dtype=torch.uint8)
        gathered = [torch.empty(len(send), dtype=torch.uint8) for _ in range(self._size)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)

        def finish() -> None:
            torch.cat(gathered, out=torch.frombuffer(receive, dtype=torch.uint8))

        return GroupPending(work, finish)

    def start_broadcast(self, buffer: bytearray, root: int) -> GroupPending:
        shared = torch.frombuffer(buffer, dtype=torch.uint8)
        work = dist.broadcast(shared, src=root, group=self._group, async_op=True)
        return GroupPending(work, lambda: None)

    def close(self) -> None:
        self._group = None
