"""Views of one buffer that stay with it: to make a view anew takes several times as long as to copy one.

In: a flat buffer of bytes that is used again and again, and the layouts of the messages that come to lie in
it. Out: a new tensor for each value of a message, over the buffer's memory. The views that stay refer to the
memory too: who counts how many tensors do has to take `num_kept` of them off.
"""

from __future__ import annotations

import torch

from rannc_backend.kernels.message_layout import MessageLayout

_MAX_LAYOUTS = 8


class KeptViews:
    """See the module docstring. A buffer has one layout as long as batches have one size; more than a few are
    forgotten.
    """

    __slots__ = ("_by_layout", "memory", "num_kept")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.num_kept = 0
        self._by_layout: dict[MessageLayout, tuple[torch.Tensor, ...]] = {}

    def message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The part of the buffer that a message takes (one tensor that travels as it is, as that; else
        bytes), and its values in it.
        """
        kept = self._by_layout.get(layout)
        if kept is None:
            kept = self._keep(layout)
        if layout.is_plain_tensor:
            message = kept[0].data
            return message, [message]
        message, *views = [each.data for each in kept]
        return message, views

    def bytes_of(self, layout: MessageLayout) -> torch.Tensor:
        """The bytes that a message of several values takes, as one tensor that stays."""
        kept = self._by_layout.get(layout)
        return (self._keep(layout) if kept is None else kept)[0]

    def _keep(self, layout: MessageLayout) -> tuple[torch.Tensor, ...]:
        if len(self._by_layout) >= _MAX_LAYOUTS:
            self._by_layout.clear()
            self.num_kept = 0
        message = new_message(self.memory, layout)
        kept = tuple(each.data for each in (message[:1] if layout.is_plain_tensor else message))
        self._by_layout[layout] = kept
        self.num_kept += len(kept)
        return kept


def new_message(memory: torch.Tensor, layout: MessageLayout) -> tuple[torch.Tensor, ...]:
    """What `KeptViews.message` gives, of memory that is not kept: the message, and then its values; the message alone
    where it must be unpacked.
    """
    message = memory if memory.numel() == layout.num_bytes else memory[: layout.num_bytes]
    if not layout.is_exact:
        return (message,)
    views = layout.views(message)
    return (views[0], *views) if layout.is_plain_tensor else (message, *views)
