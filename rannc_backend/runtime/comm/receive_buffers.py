"""Memory that is used again and again for messages: device buffers to receive into, pinned host buffers to
stage in.

In: sizes in bytes. Out: tensors of bytes that stay the pool's. Terms: a buffer is *acquired* until nobody
else refers to it (device) or it is given back (pinned); it is *ready* when the event after its last use has
passed, and may be written again from then on.

A fresh tensor would do for a receive as well, but torch's allocator takes it from memory that kernels already
queued on the compute stream may still use, so that the receive had to wait for all of them. An acquired
buffer waits for its own last use only, which lies at least one micro-batch back: the transfer runs under the
compute that is queued now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rannc_backend.kernels.kept_views import KeptViews
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.runtime.comm.streams import DeviceLayer, Event
from rannc_backend.runtime.torch_internals import num_storage_users, storage_key

# Buffers are reused for messages of at least half their size; the last batch of an epoch is smaller than the
# others.
_GRAIN_BYTES = 512
_MAX_SLACK = 2
# A buffer that no step has used for so long is given back: batches have become smaller, or another graph
# runs.
_IDLE_STEPS = 4
_MAX_PINNED = 64


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: torch.Tensor  # uint8
    ready: Event
    last_step: int
    views: KeptViews

    @property
    def is_acquired(self) -> bool:
        """Whether anybody else refers to it."""
        return num_storage_users(self.memory) > 1 + self.views.num_kept


@dataclass(slots=True)
class ReceiveBuffers:
    """Device buffers of one rank."""

    layer: DeviceLayer
    _acquired: dict[int, _Buffer] = field(default_factory=dict)  # by storage
    _free: list[_Buffer] = field(default_factory=list)  # in the order in which their last uses were queued
    _step: int = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` bytes, contiguous, at an address that is a multiple of 512; see `ready_of`."""
        return self._take(num_bytes).memory[:num_bytes]

    def take_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `take`, for such a message: what to receive into, and the message's values in it."""
        return self._take(layout.num_bytes).views.message(layout)

    def _take(self, num_bytes: int) -> _Buffer:
        most_bytes = _MAX_SLACK * max(num_bytes, _GRAIN_BYTES)
        for place, chosen in enumerate(self._free):
            if num_bytes <= chosen.memory.numel() <= most_bytes:
                del self._free[place]
                break
        else:
            memory = self.layer.empty(-(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
            # The allocator may have taken it from kernels that are still queued.
            chosen = _Buffer(memory, self.layer.compute().record_event(), self._step, KeptViews(memory))
        chosen.last_step = self._step
        self._acquired[storage_key(chosen.memory)] = chosen
        return chosen

    def ready_of(self, tensor: torch.Tensor) -> Event | None:
        """The event after which ``tensor`` may be written; None when its memory is not of this pool."""
        buffer = self._acquired.get(storage_key(tensor))
        return None if buffer is None else buffer.ready

    def after_compute(self) -> None:
        """Take back what nobody refers to any more: its last use has been queued on the compute stream."""
        returned = [key for key, buffer in self._acquired.items() if not buffer.is_acquired]
        if not returned:
            return
        event = self.layer.compute().record_event()
        for key in returned:
            buffer = self._acquired.pop(key)
            buffer.ready = event
            self._free.append(buffer)

    def begin_step(self) -> None:
        """One more step: buffers that have not been used for some steps go back to torch."""
        self._step += 1
        self.after_compute()
        # Receives into it were waited for by the compute stream, and uses were on it: the allocator's order
        # holds.
        self._free = [buffer for buffer in self._free if self._step - buffer.last_step <= _IDLE_STEPS]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, acquired or not."""
        return sum(buffer.memory.numel() for buffer in [*self._free, *self._acquired.values()])


@dataclass(slots=True)
class PinnedBuffers:
    """Pinned host buffers of one rank."""

    layer: DeviceLayer
    _free: list[tuple[torch.Tensor, Event | None]] = field(default_factory=list)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory of at least ``num_bytes`` that neither the device nor a socket uses."""
        for index, (memory, event) in enumerate(self._free):
            fits = num_bytes <= memory.numel() <= _MAX_SLACK * max(num_bytes, _GRAIN_BYTES)
            if fits and (event is None or event.query()):
                del self._free[index]
                return memory
        return self.layer.pinned(-(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)

    def give_back(self, memory: torch.Tensor, event: Event | None = None) -> None:
        """``memory`` of `take` is free once ``event`` has passed; None: now."""
        self._free.append((memory, event))
        if len(self._free) > _MAX_PINNED:
            # Sizes have changed many times. Torch frees pinned memory only after the copies from and to it.
            del self._free[0]
