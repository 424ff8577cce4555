"""Many gradients to a flat bucket, and back, in one launch: cast, scale, accumulate, and what a norm needs.

In: gradients of any floating dtypes, a bucket (one dimension, float32, float16, bfloat16 or float64) and the element at which each
gradient begins. Out: ``bucket[o : o + n] = gradient * scale``, or added to it; on request the sum of squares of all that was written and
whether any of it is infinite or NaN, both on the device. The way back, for gradients that cannot be views of the bucket, is
``gradient = bucket[o : o + n] * scale``.

Compression is a bucket of fewer bits: with ``scale`` s into a float16 bucket, all-reduce, and 1 / s on the way back. The product is rounded
once, after scaling, in float32 (float64 where the bucket is float64).

Gradients that lie in their place already (born there, by a pass) are not copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.library import wrap_triton

from rannc_backend.kernels.chunk_moves import move_elements
from rannc_backend.kernels.message_layout import slot_elements
from rannc_backend.kernels.plain_memory import has_plain_memory, plain_memory
from rannc_backend.kernels.record_table import LARGE, SMALL, CopyReport, KernelError, LaunchConfig, RecordTables, Span, make_records
from rannc_backend.kernels.triton_support import HAS_TRITON, SIMULATED, jit, on_device, operator, tl, triton_dtype

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
ACCUMULATE = 4
"""Added to a record's dtype code: the chunk is added to what is there."""

MAX_PROGRAMS = 4096
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs that gather statistics: as many as can be resident, so that few partial sums are left."""
LARGE_FROM_ELEMENTS = 1 << 20


def choose_config(num_elements: int) -> LaunchConfig:
    """Short chunks while there are too few elements to give every multiprocessor several long ones."""
    return LARGE if num_elements >= LARGE_FROM_ELEMENTS else SMALL


def aligned_offsets(numels: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Elements at which tensors of these sizes begin in a bucket so that each is aligned to 128 bytes, and the bucket's size."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += slot_elements(numel, dtype)
    return tuple(offsets), end


@jit(do_not_specialize=("scale_bits", "num_chunks"))
def _bucket_kernel(
    bucket,
    table,
    scale_bits: tl.int64,
    device_scale,
    results,
    partials,
    ticket,
    num_chunks,
    bucket_dtype: tl.constexpr,
    codes: tl.constexpr,
    to_bucket: tl.constexpr,
    statistics: tl.constexpr,
    store: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """Each program moves every ``num_programs``-th chunk. ``codes``: one bit for each dtype code that is in ``table``.

    Statistics are summed in a fixed order, so that equal steps give equal bits: per program, then by the program that ends last.
    """
    compute: tl.constexpr = tl.float64 if bucket_dtype == tl.float64 else tl.float32
    # As bits, since a float argument would be rounded to float32.
    factor = scale_bits.to(tl.float64, bitcast=True) if device_scale is None else tl.load(device_scale)
    factor = factor.to(compute)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    squares = tl.zeros((), dtype=compute)
    num_bad = tl.zeros((), dtype=tl.int32)
    chunk = program
    while chunk < num_chunks:
        record = table + chunk.to(tl.int64) * 4
        address, place = tl.load(record), bucket.to(tl.int64) + tl.load(record + 1)
        count, kind = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
        for code in tl.static_range(4):
            if (codes >> code) & 1:
                if (kind & 3) == code:
                    more_squares, more_bad = _move_chunk(
                        address,
                        place,
                        count,
                        factor,
                        (kind & 4) != 0,
                        code,
                        bucket_dtype,
                        to_bucket,
                        compute,
                        statistics,
                        store,
                        block,
                        lanes,
                        simulated,
                    )
                    squares += more_squares
                    num_bad += more_bad
        chunk += num_programs
    if statistics:
        _sum_over_programs(results, partials, ticket, program, num_programs, squares, num_bad)


@jit
def _move_chunk(
    address,
    place,
    count,
    factor,
    accumulate,
    code: tl.constexpr,
    bucket_dtype: tl.constexpr,
    to_bucket: tl.constexpr,
    compute: tl.constexpr,
    statistics: tl.constexpr,
    store: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    dtype: tl.constexpr = tl.float32 if code == 0 else tl.float16 if code == 1 else tl.bfloat16 if code == 2 else tl.float64
    if to_bucket:
        result = move_elements(
            address, place, count, factor, accumulate, dtype, bucket_dtype, compute, statistics, store, block, lanes, simulated
        )
    else:
        result = move_elements(
            place, address, count, factor, accumulate, bucket_dtype, dtype, compute, statistics, store, block, lanes, simulated
        )
    return result


@jit
def _sum_over_programs(results, partials, ticket, program, num_programs, squares, num_bad):
    dtype: tl.constexpr = partials.dtype.element_ty
    tl.store(partials + 2 * program, squares)
    tl.store(partials + 2 * program + 1, num_bad.to(dtype))
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        all_squares = tl.zeros((256,), dtype=dtype)
        all_bad = tl.zeros((256,), dtype=dtype)
        start = num_programs * 0
        while start < num_programs:
            others = start + tl.arange(0, 256)
            all_squares += tl.load(partials + 2 * others, mask=others < num_programs, other=0.0, cache_modifier=".cg")
            all_bad += tl.load(partials + 2 * others + 1, mask=others < num_programs, other=0.0, cache_modifier=".cg")
            start += 256
        tl.store(results, tl.sum(all_squares))
        tl.store(results + 1, tl.where(tl.sum(all_bad) > 0, 1.0, 0.0).to(dtype))
        tl.store(ticket, 0)


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """What a launch found in all that it wrote; stays on the device. One object serves one bucket at a time."""

    results: torch.Tensor
    """[2], float64 for a float64 bucket, else float32: sum of squares, and 1.0 if anything is infinite or NaN."""
    partials: torch.Tensor
    ticket: torch.Tensor

    @classmethod
    def make(cls, bucket: torch.Tensor, results: torch.Tensor | None = None) -> BucketStatistics:
        """For buckets of the dtype and on the device of ``bucket``."""
        dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        return cls(
            results=torch.zeros(2, dtype=dtype, device=bucket.device) if results is None else results,
            partials=torch.empty(2 * MAX_PROGRAMS, dtype=dtype, device=bucket.device),
            ticket=torch.zeros(1, dtype=torch.int32, device=bucket.device),
        )

    @property
    def sum_of_squares(self) -> torch.Tensor:
        """A scalar tensor."""
        return self.results[0]

    @property
    def found_inf(self) -> torch.Tensor:
        """[1]: 1.0 if anything is infinite or NaN, as `torch.amp.GradScaler` wants it."""
        return self.results[1:]


def write_bucket(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: float | torch.Tensor = 1.0,
    accumulate: bool | Sequence[bool] = False,
    statistics: BucketStatistics | None = None,
    tables: RecordTables | None = None,
) -> CopyReport:
    """``scale`` times each gradient to the bucket, from element ``offsets[i]`` on, or added to it; one launch.

    ``scale``: a number, or a tensor of one element on the bucket's device, read there. ``accumulate``: for all or for each. A gradient that
    is the very memory of its slot is not moved nor added, only scaled. ``tables``: the caller's cache; without one, a table is built anew.
    Raises KernelError for integers, for several devices, for slots outside of the bucket.
    """
    check_slots(bucket, gradients, offsets)
    flags = [accumulate] * len(gradients) if isinstance(accumulate, bool) else list(accumulate)
    return _move(bucket, gradients, offsets, scale, flags, statistics, tables, to_bucket=True)


def read_bucket(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    *,
    scale: float | torch.Tensor = 1.0,
    accumulate: bool | Sequence[bool] = False,
    tables: RecordTables | None = None,
) -> CopyReport:
    """``scale`` times each slot of the bucket to the gradient that begins at element ``offsets[i]``, or added to it; one launch.

    The way back of :func:`write_bucket`; ``gradients`` must be contiguous, and those that are views of their slot are not moved.
    """
    check_slots(bucket, gradients, offsets)
    flags = [accumulate] * len(gradients) if isinstance(accumulate, bool) else list(accumulate)
    return _move(bucket, gradients, offsets, scale, flags, None, tables, to_bucket=False)


def _move(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float | torch.Tensor,
    accumulate: Sequence[bool],
    statistics: BucketStatistics | None,
    tables: RecordTables | None,
    *,
    to_bucket: bool,
) -> CopyReport:
    if len(accumulate) != len(gradients):
        raise KernelError(f"{len(gradients)} gradients, but {len(accumulate)} values of accumulate")
    check_gradients(bucket, gradients)
    report = CopyReport()
    strided = [gradient for gradient in gradients if not has_plain_memory(gradient)]
    if strided:
        if not to_bucket:
            raise KernelError("a gradient to be read from a bucket must be contiguous, and not be marked as negative")
        report += CopyReport(bytes_copied=sum(each.nbytes for each in strided), launches=len(strided))
        gradients = [plain_memory(gradient) for gradient in gradients]
    if HAS_TRITON and bucket.is_cuda:
        return report + launch(bucket, gradients, offsets, scale, accumulate, statistics, tables, to_bucket=to_bucket)
    results = None if statistics is None else statistics.results
    placed = in_place(bucket, gradients, offsets)
    reference(bucket, gradients, offsets, scale, accumulate, placed, results, to_bucket=to_bucket)
    moved = [not there or is_scaled(scale) for there in placed]
    return report + count_copies(bucket, gradients, moved, num_launches=sum(moved), to_bucket=to_bucket)


def check_slots(bucket: torch.Tensor, gradients: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """Raise KernelError for a bucket or for slots that cannot be, naming the first."""
    if bucket.dim() != 1 or not bucket.is_contiguous() or bucket.dtype not in DTYPE_CODES:
        raise KernelError(f"a bucket is contiguous, floating and of one dimension, not {bucket.dtype} of shape {tuple(bucket.shape)}")
    if len(offsets) != len(gradients):
        raise KernelError(f"{len(gradients)} gradients, but {len(offsets)} offsets")
    size = bucket.numel()
    for index, (gradient, offset) in enumerate(zip(gradients, offsets)):
        if offset < 0 or offset + gradient.numel() > size:
            raise KernelError(f"gradient {index} needs elements {offset} to {offset + gradient.numel()} of a bucket of {size}")


def check_gradients(bucket: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    """Raise KernelError for gradients that the kernel cannot move, naming the first."""
    device = bucket.device
    for index, gradient in enumerate(gradients):
        if gradient.dtype not in DTYPE_CODES:
            raise KernelError(f"gradient {index} is {gradient.dtype}; a bucket takes float32, float16, bfloat16 and float64")
        if gradient.device != device:
            raise KernelError(f"gradient {index} is on {gradient.device}, its bucket on {device}")


def in_place(bucket: torch.Tensor, gradients: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[bool]:
    """For each contiguous gradient, whether it is the memory of its slot."""
    base, item_bytes, dtype = bucket.data_ptr(), bucket.element_size(), bucket.dtype
    return [
        gradient.data_ptr() == base + offset * item_bytes and gradient.dtype == dtype
        for gradient, offset in zip(gradients, offsets)
    ]


def is_scaled(scale: float | torch.Tensor) -> bool:
    """Whether values change on their way, as far as the host knows."""
    return isinstance(scale, torch.Tensor) or scale != 1.0


def count_copies(
    bucket: torch.Tensor, gradients: Sequence[torch.Tensor], moved: Sequence[bool], *, num_launches: int, to_bucket: bool
) -> CopyReport:
    """The report of one call: bytes on the side that is written."""
    sizes = [gradient.numel() * (bucket.element_size() if to_bucket else gradient.element_size()) for gradient in gradients]
    bytes_copied = sum(size for size, was_moved in zip(sizes, moved) if was_moved)
    return CopyReport(bytes_copied, sum(sizes) - bytes_copied, num_launches)


def reference(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float | torch.Tensor,
    accumulate: Sequence[bool],
    placed: Sequence[bool],
    results: torch.Tensor | None,
    *,
    to_bucket: bool,
) -> None:
    """What the kernel does, in plain PyTorch; also what graphs are traced with. ``placed``: see :func:`in_place`."""
    compute = torch.float64 if bucket.dtype == torch.float64 else torch.float32
    scaled = is_scaled(scale)
    factor = scale.to(compute) if isinstance(scale, torch.Tensor) else scale
    squares = num_bad = 0
    if results is not None:
        squares = torch.zeros((), dtype=compute, device=bucket.device)
        num_bad = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for gradient, offset, added, there in zip(gradients, offsets, accumulate, placed):
        slot = bucket[offset : offset + gradient.numel()]
        source, target = (gradient.view(-1), slot) if to_bucket else (slot, gradient.view(-1))
        if scaled or not there:
            values = source.to(compute) * factor if scaled else source
            if not added or there:
                target.copy_(values)
            elif target.dtype == compute:
                target.add_(values.to(compute))
            else:
                target.copy_(target.to(compute) + values.to(compute))
        if results is not None:
            written = target.to(compute)
            squares = squares + (written * written).sum()
            num_bad = num_bad + written.isfinite().logical_not().sum()
    if results is not None:
        results.copy_(torch.stack([squares, (num_bad > 0).to(compute)]))


def launch(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float | torch.Tensor,
    accumulate: Sequence[bool],
    statistics: BucketStatistics | None,
    tables: RecordTables | None,
    *,
    to_bucket: bool,
    config: LaunchConfig | None = None,
) -> CopyReport:
    """Start the kernel once for all ``gradients``, contiguous and checked; not at all if nothing has to move and nothing is measured."""
    placed = in_place(bucket, gradients, offsets)
    scaled = is_scaled(scale)
    moved = [scaled or not there for there in placed]
    config = config or choose_config(sum(gradient.numel() for gradient in gradients))
    if bucket.dtype == torch.float64 or any([gradient.dtype == torch.float64 for gradient in gradients]):
        config = LaunchConfig(block=config.block // 2, num_warps=config.num_warps)
    pointers, numels = [gradient.data_ptr() for gradient in gradients], [gradient.numel() for gradient in gradients]
    codes = [DTYPE_CODES[gradient.dtype] for gradient in gradients]
    chosen = range(len(gradients)) if statistics is not None else [index for index, move in enumerate(moved) if move]

    def build() -> np.ndarray:
        return make_records(
            [
                Span(
                    address=pointers[index],
                    offset=offsets[index] * bucket.element_size(),
                    count=numels[index],
                    kind=codes[index] + (ACCUMULATE if accumulate[index] and not placed[index] else 0),
                    address_step=gradients[index].element_size(),
                    offset_step=bucket.element_size(),
                    chunk=config.block,
                )
                for index in chosen
            ]
        )

    layout = (tuple(numels), tuple(codes), tuple(offsets), tuple(accumulate), tuple(placed), tuple(chosen))
    key = ("bucket", bucket.dtype, config, tuple(pointers), layout)
    table = (tables or RecordTables()).get(key, bucket.device, build)
    num_chunks = table.shape[0]
    if num_chunks == 0 and statistics is None:
        return count_copies(bucket, gradients, moved, num_launches=0, to_bucket=to_bucket)
    num_programs = num_chunks
    if statistics is not None:
        num_programs = max(1, min(num_chunks, _max_programs(bucket.device)))
    with on_device(bucket):
        _bucket_kernel[(num_programs,)](
            bucket,
            table,
            _bits_of(1.0 if isinstance(scale, torch.Tensor) else scale),
            scale if isinstance(scale, torch.Tensor) else None,
            *((None, None, None) if statistics is None else (statistics.results, statistics.partials, statistics.ticket)),
            num_chunks,
            bucket_dtype=triton_dtype(bucket.dtype),
            codes=sum({1 << codes[index] for index in chosen}),
            to_bucket=to_bucket,
            statistics=statistics is not None,
            store=any(moved),
            block=config.block,
            lanes=32 * config.num_warps,
            simulated=SIMULATED,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    return count_copies(bucket, gradients, moved, num_launches=1, to_bucket=to_bucket)


def _bits_of(scale: float) -> int:
    return struct.unpack("<q", struct.pack("<d", scale))[0]


def _max_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return min(MAX_PROGRAMS, PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


@operator("rannc::write_bucket", mutates_args=("bucket", "results"))
def write_bucket_operator(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float,
    accumulate: Sequence[bool],
    results: Sequence[torch.Tensor],
) -> None:
    """:func:`write_bucket` for graphs. ``results``: empty, or one [2] tensor for what BucketStatistics holds."""
    check_slots(bucket, gradients, offsets)
    check_gradients(bucket, gradients)
    if HAS_TRITON and bucket.is_cuda and wrap_triton(_bucket_kernel) is _bucket_kernel:
        statistics = BucketStatistics.make(bucket, results[0]) if results else None
        contiguous = [plain_memory(gradient) for gradient in gradients]
        launch(bucket, contiguous, offsets, scale, accumulate, statistics, None, to_bucket=True)
    else:
        contiguous = [plain_memory(gradient) for gradient in gradients]
        placed = [False] * len(gradients)
        reference(bucket, contiguous, offsets, scale, accumulate, placed, results[0] if results else None, to_bucket=True)


@operator("rannc::read_bucket", mutates_args=("gradients",))
def read_bucket_operator(
    bucket: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    scale: float,
    accumulate: Sequence[bool],
) -> None:
    """:func:`read_bucket` for graphs."""
    check_slots(bucket, gradients, offsets)
    check_gradients(bucket, gradients)
    if HAS_TRITON and bucket.is_cuda and wrap_triton(_bucket_kernel) is _bucket_kernel:
        launch(bucket, gradients, offsets, scale, accumulate, None, None, to_bucket=False)
    else:
        reference(bucket, gradients, offsets, scale, accumulate, [False] * len(gradients), None, to_bucket=False)
