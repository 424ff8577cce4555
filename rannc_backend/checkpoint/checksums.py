"""Checksums of tensors' bytes, as they are in memory and in files."""

from __future__ import annotations

import zlib

import torch

from rannc_backend.kernels.plain_memory import plain_memory


def crc32_of(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's elements in order."""
    flat = plain_memory(tensor.detach()).reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
