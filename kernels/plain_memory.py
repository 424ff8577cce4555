"""The one edge at which the memory of a tensor is read as it is: by a kernel, a message, a file, a checksum.

In: any tensor. Out: one whose memory, element by element in order, is its value. Terms: a *mark* is what
torch puts on a view in place of computing it: `x.conj()` and the imaginary part of one lie in the memory of
``x`` and are only marked as conjugate or negative. Torch's own operators look at the marks; whatever goes by
address, size and dtype does not, and would read the number that ``x`` has there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

_IS_CONTIGUOUS, _IS_CONJ, _IS_NEG = torch.Tensor.is_contiguous, torch.Tensor.is_conj, torch.Tensor.is_neg


def has_marks(tensor: torch.Tensor) -> bool:
    """Whether the tensor is another number than its memory says."""
    return tensor.is_conj() or tensor.is_neg()


def without_marks(tensor: torch.Tensor) -> torch.Tensor:
    """The same value in memory that says so; the tensor itself where it does already."""
    return tensor.resolve_conj().resolve_neg() if has_marks(tensor) else tensor


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in its memory as they are, one after the other."""
    return tensor.is_contiguous() and not has_marks(tensor)


def all_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have plain memory: as `has_plain_memory` of each, in a third of the time."""
    return (
        all(map(_IS_CONTIGUOUS, tensors))
        and not any(map(_IS_CONJ, tensors))
        and not any(map(_IS_NEG, tensors))
    )


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same value, contiguous and without marks; the tensor itself where it is so already."""
    return without_marks(tensor).contiguous()


def crc32_of(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's elements in order, as they are in memory and in files."""
    flat = plain_memory(tensor.detach()).cpu().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
