"""Many tensors to one message and back.

In: tensors of any dtype. Out: one contiguous byte buffer in which each tensor starts at a multiple of 128 bytes, and views of such a
buffer. Unpacking copies nothing; one contiguous tensor needs no packing at all, so callers send it as it is.

This file holds the plain-PyTorch form, which defines the layout that every other form must produce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 128


def message_offsets(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> tuple[tuple[int, ...], int]:
    """Byte offset of each tensor in its message, and the message's size in bytes."""
    offsets, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets.append(end)
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(offsets), end


def message_views(buffer: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Views into ``buffer`` (uint8, one dimension) of the tensors packed there."""
    offsets, _ = message_offsets(shapes, dtypes)
    views = []
    for offset, shape, dtype in zip(offsets, shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        views.append(buffer[offset : offset + size].view(dtype).view(tuple(shape)))
    return views


def pack_message(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``tensors`` in one new uint8 buffer, laid out by :func:`message_offsets`."""
    shapes, dtypes = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
    _, size = message_offsets(shapes, dtypes)
    buffer = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(message_views(buffer, shapes, dtypes), tensors, strict=True):
        view.copy_(tensor)
    return buffer
