"""Tensors between ranks over torch.distributed, and the control wire for jobs without MPI.

In: contiguous tensors, peers, channel names, groups of ranks. Out: `Work` objects, to be waited for.
Terms: gloo carries CPU tensors and tells messages of one pair apart by a *tag*, one per channel; NCCL carries CUDA
tensors in a process group per channel, because its groups run their operations one after the other. *Staging*: CUDA
tensors travel over gloo through pinned host memory, where ranks share a device.

Facts about gloo that shape this file: a message whose Work is dropped is lost; `is_completed()` of a message stays
False until `wait()`; a `wait` that expires breaks the connection; a send does not complete before its receive is posted.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rannc_backend.errors import CommunicationError

UNLIMITED = datetime.timedelta(days=7)
# Tags 0 to 15 are left to others on the same group.
_FIRST_TAG = 16


class WaitWatch(Protocol):
    """Is told for whom this rank waits, so that a wait for a rank that has left does not last until its limit."""

    def begin_wait(self, ranks: tuple[int, ...]) -> None: ...

    def end_wait(self) -> None: ...


class DoneWork:
    """Nothing to wait for: an empty tensor, or a group of one."""

    def wait(self, limit_seconds: float | None = None) -> None:
        return


class DistWork:
    """A torch.distributed Work with what it must keep alive and what to say when it fails.

    Args:
        peers: the ranks whose part this waits for.
        on_stream: NCCL: waiting only orders the current stream.
        after: to be called when the tensor has arrived.
    """

    __slots__ = ("_after", "_on_stream", "_peers", "_tensor", "_transport", "_what", "_work")

    def __init__(
        self,
        transport: GroupTransport,
        work: Any,
        tensor: torch.Tensor,
        *,
        peers: tuple[int, ...],
        what: str,
        on_stream: bool = False,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._work = work
        self._tensor: torch.Tensor | None = tensor
        self._peers = peers
        self._what = what
        self._on_stream = on_stream
        self._after = after

    def wait(self, limit_seconds: float | None = None) -> None:
        if self._work is None:
            return
        if self._on_stream:
            self._work.wait()
        else:
            self._wait_on_host(self._transport.limit_seconds if limit_seconds is None else limit_seconds)
        if self._after is not None:
            self._after()
        self._work = self._tensor = self._after = None

    def _wait_on_host(self, limit_seconds: float) -> None:
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


class SingleTransport:
    """Transport of a job of one process."""

    def prepare(self, *, channels: Sequence[str] = (), groups: Sequence[tuple[int, ...]] = ()) -> None:
        return

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        raise AssertionError(f"message {channel!r} to rank {peer} in a job of one process")

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        raise AssertionError(f"message {channel!r} from rank {peer} in a job of one process")

    def allreduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> DoneWork:
        return DoneWork()

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> DoneWork:
        return DoneWork()

    def close(self) -> None:
        return


class GroupTransport:
    """Transport over process groups of our own, so that the user's collectives cannot meet ours.

    Args:
        device: device of the tensors. CUDA tensors go over NCCL unless `staged`.
        staged: carry CUDA tensors over gloo, through pinned host memory.
        limit_seconds: longest wait where `wait` gives none; with NCCL, the time-out of the groups.
        message_group: gloo group of all ranks for messages, made by bootstrap.
        owns_default_group: torch.distributed was started by us, and ends with us.
        watch: the monitor.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        staged: bool,
        limit_seconds: float,
        message_group: Any,
        owns_default_group: bool,
        watch: WaitWatch,
    ) -> None:
        self.rank = rank
        self.limit_seconds = limit_seconds
        self.watch = watch
        self._size = size
        self._device = device
        self._nccl = device.type == "cuda" and not staged
        self._message_group = message_group
        self._owns_default_group = owns_default_group
        self._channels: dict[str, Any] = {}  # tag with gloo, process group with NCCL
        self._groups: dict[tuple[int, ...], Any] = {}

    def prepare(self, *, channels: Sequence[str] = (), groups: Sequence[tuple[int, ...]] = ()) -> None:
        everyone = tuple(range(self._size))
        for channel in channels:
            if channel not in self._channels:
                self._channels[channel] = (
                    self._new_group(everyone) if self._nccl else _FIRST_TAG + len(self._channels)
                )
        for ranks in groups:
            assert list(ranks) == sorted(set(ranks)), f"group {ranks} is not in ascending order"
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = self._new_group(ranks)

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        what = f"send of {channel!r}"
        if self._nccl:
            return self._nccl_message(dist.isend, tensor, peer, channel, what)
        host = tensor
        if tensor.is_cuda:
            host = _pinned_like(tensor)
            host.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        work = dist.isend(_as_bytes(host), dst=peer, group=self._message_group, tag=self._channels[channel])
        return DistWork(self, work, host, peers=(peer,), what=what)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        what = f"receive of {channel!r}"
        if self._nccl:
            return self._nccl_message(dist.irecv, tensor, peer, channel, what)
        host = _pinned_like(tensor) if tensor.is_cuda else tensor
        after = (lambda: _copy_into(tensor, host)) if tensor.is_cuda else None
        work = dist.irecv(_as_bytes(host), src=peer, group=self._message_group, tag=self._channels[channel])
        return DistWork(self, work, host, peers=(peer,), what=what, after=after)

    def allreduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> DistWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        work = dist.all_reduce(tensor, group=self._groups[ranks], async_op=True)
        what = f"all-reduce over ranks {list(ranks)}"
        return DistWork(self, work, tensor, peers=ranks, what=what, on_stream=self._nccl)

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> DistWork | DoneWork:
        if len(ranks) == 1 or tensor.numel() == 0:
            return DoneWork()
        work = dist.broadcast(tensor, src=root, group=self._groups[ranks], async_op=True)
        what = f"broadcast from rank {root} over ranks {list(ranks)}"
        return DistWork(self, work, tensor, peers=(root,), what=what, on_stream=self._nccl)

    def close(self) -> None:
        # gloo's threads hold the last tensors of a group; a group that outlives the interpreter aborts the process
        # when they let go. So everything goes now: groups, our references, and then whatever the collector finds.
        groups = [*self._groups.values(), *(group for group in self._channels.values() if self._nccl)]
        groups.append(self._message_group)
        self._groups.clear()
        self._channels.clear()
        self._message_group = None
        if dist.is_initialized():
            if self._owns_default_group:
                dist.destroy_process_group()
            else:
                for group in groups:
                    dist.destroy_process_group(group)
        groups.clear()
        gc.collect()

    def _nccl_message(
        self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int, channel: str, what: str
    ) -> DistWork:
        # A batch of one uses the communicator of the whole group, warmed by prepare; a plain isend would make one for
        # the pair on its first use, which waits for the peer and can deadlock.
        message = dist.P2POp(operation, tensor, peer, self._channels[channel])
        (work,) = dist.batch_isend_irecv([message])
        return DistWork(self, work, tensor, peers=(peer,), what=what, on_stream=True)

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        # gloo's own limit is beyond any that `wait` gives; NCCL has no other, its watchdog keeps it.
        limit = datetime.timedelta(seconds=self.limit_seconds) if self._nccl else UNLIMITED
        group = dist.new_group(list(ranks), timeout=limit, backend="nccl" if self._nccl else "gloo")
        if self._nccl and self.rank in ranks:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def _check_message(self, tensor: torch.Tensor, peer: int, channel: str) -> None:
        assert peer != self.rank, f"message {channel!r} of rank {peer} to itself"
        assert channel in self._channels, f"channel {channel!r} was not prepared"
        assert tensor.is_contiguous(), f"message {channel!r} is not contiguous"


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


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _copy_into(target: torch.Tensor, host: torch.Tensor) -> None:
    target.copy_(host)
