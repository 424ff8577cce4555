"""What the runtime needs of a device that works behind the host, in one small layer that tests can replace.

In: a CUDA device. Out: streams, events and memory. Terms: the *compute stream* is the one on which the
caller's operators are queued (torch's current stream, asked for anew each time); an *event* marks a place in
a stream; another stream can wait for it without the host.

Torch's allocator gives memory of a stream back in that stream's order: a tensor that was made on the compute
stream may be dropped while kernels of the compute stream still use it, but not while another stream does.
Whoever hands memory to another stream keeps the tensor until the compute stream has been made to wait for
that stream's event. `Tensor.record_stream` would be the alternative; it frees memory by the clock of the
device instead of the order of the program, so that a host that runs ahead needs more of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has passed it. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait for it on the host."""
        ...


class Stream(Protocol):
    """A queue of a device; `torch.cuda.Stream` in production."""

    def record_event(self) -> Event:
        """A new event behind everything queued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is queued from now on starts after ``event``. The host goes on."""
        ...


class DeviceLayer(Protocol):
    """Streams and memory of one device."""

    def compute(self) -> Stream:
        """The compute stream."""
        ...

    def new_stream(self) -> Stream:
        """A stream of its own, which the device prefers to the compute stream: what it carries, others wait
        for.
        """
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it, ``stream`` is torch's current stream."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Device memory of the compute stream: kernels queued there may still use it."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to without the host."""
        ...


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one dimension of bytes: so any dtype travels."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype != torch.uint8:
        tensor = tensor.view(-1).view(torch.uint8)
    return tensor.view(-1) if tensor.dim() != 1 else tensor


_NCCL_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


def nccl_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as NCCL takes it: itself, or its bytes where NCCL has no such dtype. Both ends of a message
    have tensors of one dtype. (A view as bytes costs the host 5 µs.)
    """
    if tensor.dtype not in _NCCL_DTYPES:
        return byte_view(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def unrecorded_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, as `nccl_view` has it, under a storage that torch's allocator does not know, so that
    `record_stream` does nothing to it.

    The alias keeps the tensor alive. Torch's point-to-point operations record their stream on what they are
    given; whoever keeps the tensor until the compute stream has been made to wait for the operation does not
    need that.
    """
    view = nccl_view(tensor)
    if view.is_cuda and torch.cuda.get_allocator_backend() != "native":
        return view  # other allocators look the address up, and would not find one inside a block
    return from_dlpack(to_dlpack(view))


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """The real one."""

    device: torch.device

    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
