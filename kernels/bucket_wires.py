"""Buckets of gradients to the dtype in which they are summed over ranks, and back, with a scale: one launch each.

In: a flat buffer, another of as many elements in another dtype, a scale. Out: ``narrow = wide * scale`` before the
sum, ``wide = sum / scale`` after it. Products and quotients are formed in float32 (float64 where the wide side is
float64) and rounded once to the dtype that is written. What is beyond the range of the narrow dtype becomes infinite,
and stays so.

The scale is a number of the launch, not of the device: each value that is used compiles a kernel.
"""

from __future__ import annotations

import torch

from rannc_backend.kernels.chunk_moves import move_elements
from rannc_backend.kernels.gradient_views import choose_config
from rannc_backend.kernels.record_table import LaunchConfig
from rannc_backend.kernels.triton_support import HAS_TRITON, SIMULATED, jit, on_device, tl, triton_dtype

GRADIENT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By what the option gradient_dtype says."""


def dtype_on_wire(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In which gradients are summed over ranks whose sums over micro-batches have ``dtype``: ``wanted`` where that is
    narrower.
    """
    is_wider = dtype.is_floating_point and wanted is not None and dtype.itemsize > wanted.itemsize
    return wanted if is_wider and wanted is not None else dtype


@jit
def _convert_kernel(
    source,
    target,
    count,
    from_dtype: tl.constexpr,
    to_dtype: tl.constexpr,
    times: tl.constexpr,
    over: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """Program i converts elements [i * block, (i + 1) * block)."""
    from_bytes: tl.constexpr = from_dtype.primitive_bitwidth // 8
    to_bytes: tl.constexpr = to_dtype.primitive_bitwidth // 8
    compute: tl.constexpr = tl.float64 if from_bytes == 8 or to_bytes == 8 else tl.float32
    start = tl.program_id(0).to(tl.int64) * block
    length = tl.minimum(count - start, block).to(tl.int32)
    move_elements(
        source.to(tl.int64) + start * from_bytes,
        target.to(tl.int64) + start * to_bytes,
        length,
        False,
        from_dtype,
        to_dtype,
        compute,
        block,
        lanes,
        simulated,
        times,
        over,
    )


def to_wire(wide: torch.Tensor, narrow: torch.Tensor, scale: float) -> int:
    """``narrow = wide * scale``. Both are flat and contiguous. Returns the number of launches: one, or none for
    nothing.
    """
    return _convert(wide, narrow, times=float(scale), over=1.0)


def from_wire(narrow: torch.Tensor, wide: torch.Tensor, scale: float) -> int:
    """``wide = narrow / scale``, as `to_wire`."""
    return _convert(narrow, wide, times=1.0, over=float(scale))


def _convert(source: torch.Tensor, target: torch.Tensor, *, times: float, over: float) -> int:
    if source.numel() == 0:
        return 0
    if HAS_TRITON and source.is_cuda:
        launch_convert(source, target, times=times, over=over)
    else:
        reference_convert(source, target, times=times, over=over)
    return 1


def launch_convert(
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    times: float,
    over: float,
    config: LaunchConfig | None = None,
) -> None:
    """Start the kernel on flat buffers that are not empty."""
    config = config or choose_config(source.numel())
    block = config.block // 2 if torch.float64 in (source.dtype, target.dtype) else config.block
    with on_device(source):
        _convert_kernel[(-(-source.numel() // block),)](
            source,
            target,
            source.numel(),
            from_dtype=triton_dtype(source.dtype),
            to_dtype=triton_dtype(target.dtype),
            times=times,
            over=over,
            block=block,
            lanes=32 * config.num_warps,
            simulated=SIMULATED,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )


def reference_convert(source: torch.Tensor, target: torch.Tensor, *, times: float, over: float) -> None:
    """What the kernel does, in plain PyTorch."""
    compute = torch.float64 if torch.float64 in (source.dtype, target.dtype) else torch.float32
    values = source
    if times != 1.0:
        values = values.to(compute) * times
    if over != 1.0:
        values = values.to(compute) / over
    target.copy_(values)
