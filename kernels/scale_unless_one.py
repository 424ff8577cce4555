"""Scales flat buffers in place by a number that is on the device, and touches no memory when that number is
1.

In: contiguous floating buffers of one dimension, a scale of one element on their device. Out: ``buffer *=
scale``. The host must not read the scale, which nearly always is 1: a plain multiplication would read and
write all gradients once a step for nothing.

The product is formed in float32 (float64 for a float64 buffer) and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rannc_backend.kernels.triton_support import HAS_TRITON, jit, on_device, tl

BLOCK = 4096
"""Elements that a program scales at a time."""
MAX_PROGRAMS = 1024
NUM_WARPS = 8


@jit
def _scale_kernel(values, scale, num_values, wide: tl.constexpr, block: tl.constexpr):
    """Each program scales every ``num_programs``-th block, the first also the few elements that are left
    over.
    """
    factor = tl.load(scale).to(tl.float64 if wide else tl.float32)
    if factor != 1.0:
        # A mask that changes at multiples of 16 elements lets accesses have 128 bits.
        whole = num_values // 16 * 16
        start = tl.program_id(0).to(tl.int64) * block
        if start == 0:
            _scale(values, whole + tl.arange(0, 16), num_values, factor)
        while start < whole:
            _scale(values, start + tl.arange(0, block), whole, factor)
            start += tl.num_programs(0).to(tl.int64) * block


@jit
def _scale(values, place, end, factor):
    """Scale the elements at ``place`` that lie before ``end``."""
    loaded = tl.load(values + place, mask=place < end)
    tl.store(values + place, (loaded.to(factor.dtype) * factor).to(loaded.dtype), mask=place < end)


def scale_unless_one(buffers: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply every buffer by ``scale`` in place; one launch each."""
    for buffer in buffers:
        if buffer.numel() == 0:
            continue
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer).view(-1)
        if HAS_TRITON and buffer.is_cuda:
            _launch(buffer, scale)
        else:
            scale_reference(buffer, scale)


def _launch(buffer: torch.Tensor, scale: torch.Tensor) -> None:
    grid = (min(-(-buffer.numel() // BLOCK), MAX_PROGRAMS),)
    wide = buffer.dtype == torch.float64
    with on_device(buffer):
        _scale_kernel[grid](buffer, scale, buffer.numel(), wide=wide, block=BLOCK, num_warps=NUM_WARPS)


def scale_reference(buffer: torch.Tensor, scale: torch.Tensor) -> None:
    """The same with PyTorch, which always reads and writes."""
    compute = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    buffer.copy_(buffer.to(compute) * scale.to(compute))
