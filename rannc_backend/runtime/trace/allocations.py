"""Bytes of tensors that a piece of code makes and keeps, followed operator by operator.

In: code that runs inside `AllocationTracker.following`. Out: the most bytes that were alive at one time of
what it allocated. CPU allocators have no statistics; this sees what ATen operators return, not scratch memory
within one operator and not what compiled kernels allocate for themselves (what such kernels return is seen
when it is handed to `add`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rannc_backend.runtime.comm.host_link import HostLink
from rannc_backend.runtime.comm.streams import CudaLayer
from rannc_backend.runtime.gradients.sparse_rows import memory_of
from rannc_backend.runtime.torch_internals import NewTensors, storage_key


class AllocationTracker:
    """Counts while `following`. ``known``: tensors whose memory was there before, and does not count."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._references: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._follow(tensor, counts=False)

    def following(self) -> contextlib.AbstractContextManager[Any]:
        """Around the code; may be entered again, and what is alive from before still counts."""
        return NewTensors(lambda tensor: self._follow(tensor, counts=True))

    def add(self, values: Iterable[Any]) -> None:
        """Count the memory of tensors that no operator returned here; what is no tensor is passed over."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._follow(value, counts=True)

    def _follow(self, tensor: torch.Tensor, *, counts: bool) -> None:
        key = storage_key(tensor)
        if key in self._references or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes() if counts else 0

        def gone(reference: weakref.ref[Any]) -> None:
            if self._references.get(key) is reference:
                del self._references[key]
                self.live_bytes -= num_bytes

        self._references[key] = weakref.ref(storage, gone)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def counted_host_link(device: torch.device) -> HostLink:
    """What brings parameters from the host to a rank's device, and gradients back; it counts what the device has of both."""
    return HostLink(
        device=device,
        parameters=AllocationTracker(),
        gradients=AllocationTracker(),
        layer=CudaLayer(device) if device.type == "cuda" else None,
    )


def optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The state that optimizers keep for these parameters."""
    own = set(map(id, parameters))
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in own:
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind ``tensors``, what they share counted once."""
    parts = [part for tensor in tensors for part in memory_of(tensor)]
    return sum({storage_key(part): part.untyped_storage().nbytes() for part in parts}.values())
