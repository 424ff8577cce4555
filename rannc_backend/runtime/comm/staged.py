"""CUDA tensors over gloo, through pinned host memory: for ranks that share a device, where NCCL cannot be
used.

In: as for `transport`, tensors on a device. Out: works whose `wait` blocks the host. Gloo hands a message's
address to a socket, which cannot read a device, so each message is copied: a send from the device on a stream
of its own, after the kernels that made it; a receive to the device on the compute stream, once it is there.
The host waits for a copy only when it is about to wait for another rank anyway: whatever is copied has been
handed to gloo by then, so no two ranks can wait for each other's copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rannc_backend.runtime.comm.gloo import DistWork, DoneWork, GroupTransport
from rannc_backend.runtime.comm.receive_buffers import PinnedBuffers
from rannc_backend.runtime.comm.streams import DeviceLayer, Event, byte_view


class _StagedSend:
    """Gloo's Work of a send whose copy to the host may still be under way."""

    def __init__(self, copied: Event, start: Callable[[], Any]) -> None:
        self._copied = copied
        self._start = start
        self._work: Any = None

    @property
    def can_start(self) -> bool:
        return self._copied.query()

    def start(self) -> None:
        self._copied.synchronize()
        self._work = self._start()

    def wait(self, limit: Any) -> None:
        assert self._work is not None, "waited for before it was started"
        self._work.wait(limit)


class StagedTransport(GroupTransport):
    """See the module docstring; the arguments are those of `GroupTransport`, and the device's layer."""

    def __init__(self, *, layer: DeviceLayer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pinned = PinnedBuffers(layer)
        self._layer = layer
        self._copies = layer.new_stream()
        self._unsent: list[_StagedSend] = []

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        source = byte_view(tensor)
        memory = self.pinned.take(source.numel())
        host = memory[: source.numel()]
        self._copies.wait_event(self._layer.compute().record_event())
        with self._layer.on(self._copies):
            host.copy_(source, non_blocking=True)
            copied = self._copies.record_event()
        send = _StagedSend(copied, lambda: self._start_send(host, peer, channel))
        self._unsent.append(send)
        self._start_sends(wait=False)
        after = lambda: self.pinned.give_back(memory)  # noqa: E731
        return DistWork(self, send, tensor, peers=(peer,), what=f"send of {channel!r}", after=after)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DistWork | DoneWork:
        self._check_message(tensor, peer, channel)
        if tensor.numel() == 0:
            return DoneWork()
        target = byte_view(tensor)
        memory = self.pinned.take(target.numel())
        host = memory[: target.numel()]

        def deliver() -> None:
            target.copy_(host, non_blocking=True)
            self.pinned.give_back(memory, self._layer.compute().record_event())

        self._start_sends(wait=False)
        work = self._start_receive(host, peer, channel)
        return DistWork(self, work, tensor, peers=(peer,), what=f"receive of {channel!r}", after=deliver)

    def after_compute(self) -> None:
        self._start_sends(wait=False)

    def before_wait(self) -> None:
        self._start_sends(wait=True)

    def _start_sends(self, *, wait: bool) -> None:
        """Hand messages to gloo, oldest first: those that are copied, or all of them."""
        # In order: a channel matches its messages first in, first out.
        while self._unsent and (wait or self._unsent[0].can_start):
            self._unsent.pop(0).start()
