"""Many tensors to one message and back, in one launch; nothing that need not be copied is copied.

In: tensors of any dtype and size, and a layout (`message_layout.plan_message`) that says how each travels: as
it is, as bfloat16 or float16, or as float8 with one scale per 128 elements. Out: one contiguous byte buffer, or views of
one that came. Unpacking copies nothing but tensors whose dtype changes, those in one launch too. One
contiguous tensor that travels as it is needs no packing: its memory is the message. Nor does a tensor that
lies in its place of the message already.

float8 is e4m3; a group's scale is its largest finite or infinite magnitude / 448. A NaN stays one NaN; an
infinity turns its group to NaN. What is beyond float16 becomes infinite. Formats are refused for dtypes that they do
not make smaller (`plan_message`), float8 on NVIDIA GPUs before compute capability 8.9 (here).

This file holds the kernels, what starts them, and the plain-PyTorch form, which defines what the kernels must
produce.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from rannc_backend.kernels.chunk_moves import cast_to, copy_bytes, from_float8, move_elements, to_float8
from rannc_backend.kernels.message_layout import (
    MessageLayout,
    Wire,
    plan_message,
    slot_view,
    wire_item_bytes,
)
from rannc_backend.kernels.pack_reference import (
    Packed,
    Unpacked,
    check_buffer,
    check_float8,
    check_tensors,
    count_copies,
    reference_pack,
    reference_unpack,
)
from rannc_backend.kernels.plain_memory import all_plain, has_plain_memory, plain_memory
from rannc_backend.kernels.record_table import (
    LARGE,
    SMALL,
    CopyReport,
    LaunchConfig,
    RecordTables,
    Span,
    make_records,
    upload,
)
from rannc_backend.kernels.triton_support import HAS_TRITON, SIMULATED, jit, on_device, tl

__all__ = [
    "Packed",
    "Unpacked",
    "Wire",
    "pack",
    "plan_message",
    "unpack",
]

# What happens to a chunk. The kinds of one wire format are the dtypes that it accepts; COPY is for all that
# travels as it is.
COPY = 0
KINDS = {
    (Wire.BFLOAT16, torch.float32): 1,
    (Wire.BFLOAT16, torch.float64): 2,
    (Wire.FLOAT8, torch.float32): 3,
    (Wire.FLOAT8, torch.float16): 4,
    (Wire.FLOAT8, torch.bfloat16): 5,
    (Wire.FLOAT16, torch.float32): 6,
    (Wire.FLOAT16, torch.float64): 7,
    (Wire.FLOAT8, torch.float64): 8,
}
LARGE_FROM_BYTES = 4 << 20


def choose_config(num_bytes: int) -> LaunchConfig:
    """Short chunks while there are too few bytes to give every multiprocessor several long ones."""
    return LARGE if num_bytes >= LARGE_FROM_BYTES else SMALL


@jit
def _pack_kernel(
    message,
    table,
    scales_offset,
    kinds: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """Program i moves chunk i to ``message``. ``kinds``: one bit for each kind that is in ``table``."""
    record = table + tl.program_id(0).to(tl.int64) * 4
    address, offset = tl.load(record), tl.load(record + 1)
    count, kind = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
    start = message.to(tl.int64)
    for each in tl.static_range(9):
        if (kinds >> each) & 1:
            if kind == each:
                if each == 0:
                    copy_bytes(address, start + offset, count, block, lanes)
                elif each <= 2 or each == 6 or each == 7:
                    _narrow(address, start + offset, count, each, block, lanes, simulated)
                else:
                    _quantize(
                        address,
                        start + offset,
                        start + scales_offset + (offset >> 7) * 4,
                        count,
                        each,
                        block,
                        simulated,
                    )


@jit
def _unpack_kernel(
    message,
    output,
    table,
    scales_offset,
    kinds: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """Program i moves chunk i of ``message`` to the byte of ``output`` that its record's first column
    names.
    """
    record = table + tl.program_id(0).to(tl.int64) * 4
    address, offset = output.to(tl.int64) + tl.load(record), tl.load(record + 1)
    count, kind = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
    start = message.to(tl.int64)
    for each in tl.static_range(1, 9):
        if (kinds >> each) & 1:
            if kind == each:
                if each <= 2 or each == 6 or each == 7:
                    _widen(start + offset, address, count, each, block, lanes, simulated)
                else:
                    _dequantize(
                        start + offset,
                        start + scales_offset + (offset >> 7) * 4,
                        address,
                        count,
                        each,
                        block,
                        simulated,
                    )


@jit
def _narrow(
    source,
    target,
    count,
    kind: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    dtype: tl.constexpr = tl.float32 if kind == 1 or kind == 6 else tl.float64
    narrow: tl.constexpr = tl.bfloat16 if kind <= 2 else tl.float16
    move_elements(source, target, count, False, dtype, narrow, dtype, block, lanes, simulated)


@jit
def _widen(
    source,
    target,
    count,
    kind: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    dtype: tl.constexpr = tl.float32 if kind == 1 or kind == 6 else tl.float64
    narrow: tl.constexpr = tl.bfloat16 if kind <= 2 else tl.float16
    move_elements(source, target, count, False, narrow, dtype, dtype, block, lanes, simulated)


@jit
def _quantize(
    source, target, scales, count, kind: tl.constexpr, block: tl.constexpr, simulated: tl.constexpr
):
    dtype: tl.constexpr = (
        tl.float32 if kind == 3 else tl.float16 if kind == 4 else tl.bfloat16 if kind == 5 else tl.float64
    )
    from_items, to_items = source.to(tl.pointer_type(dtype)), target.to(tl.pointer_type(tl.float8e4nv))
    if ((source | count) & 15) == 0:
        # The same code; here the compiler knows that 16 bytes may be loaded at once, and that the mask allows
        # it.
        aligned_from, aligned_to = tl.multiple_of(from_items, 16), tl.multiple_of(to_items, 16)
        _quantize_groups(aligned_from, aligned_to, scales, (count >> 4) << 4, block, simulated)
    else:
        _quantize_groups(from_items, to_items, scales, count, block, simulated)


@jit
def _quantize_groups(source, target, scales, count, block: tl.constexpr, simulated: tl.constexpr):
    groups = tl.arange(0, block // 128)
    offsets = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = offsets < count
    values = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(values == values, tl.abs(values), 0.0), axis=1)
    largest = tl.maximum(largest, 1e-30)
    scaled = values * tl.div_rn(448.0, largest)[:, None]
    tl.store(target + offsets, to_float8(scaled, simulated), mask=inside)
    tl.store(
        scales.to(tl.pointer_type(tl.float32)) + groups, largest * (1.0 / 448.0), mask=groups * 128 < count
    )


@jit
def _dequantize(
    source, scales, target, count, kind: tl.constexpr, block: tl.constexpr, simulated: tl.constexpr
):
    dtype: tl.constexpr = (
        tl.float32 if kind == 3 else tl.float16 if kind == 4 else tl.bfloat16 if kind == 5 else tl.float64
    )
    from_items, to_items = source.to(tl.pointer_type(tl.float8e4nv)), target.to(tl.pointer_type(dtype))
    if ((target | count) & 15) == 0:
        aligned_from, aligned_to = tl.multiple_of(from_items, 16), tl.multiple_of(to_items, 16)
        _dequantize_groups(aligned_from, aligned_to, scales, (count >> 4) << 4, dtype, block, simulated)
    else:
        _dequantize_groups(from_items, to_items, scales, count, dtype, block, simulated)


@jit
def _dequantize_groups(
    source, target, scales, count, dtype: tl.constexpr, block: tl.constexpr, simulated: tl.constexpr
):
    groups = tl.arange(0, block // 128)
    offsets = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = offsets < count
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + groups, mask=groups * 128 < count, other=0.0)
    values = from_float8(tl.load(source + offsets, mask=inside), simulated) * scale[:, None]
    tl.store(target + offsets, cast_to(values, dtype, simulated), mask=inside)


def pack(
    tensors: Sequence[torch.Tensor],
    layout: MessageLayout,
    *,
    message: torch.Tensor | None = None,
    tables: RecordTables | None = None,
) -> Packed:
    """``tensors`` as one message: one launch, or none where one contiguous tensor is the message.

    ``message``: a buffer of ``layout.num_bytes`` uint8 to write to, else a new one; tensors that lie in their
    place of it already are left alone. ``tables``: the caller's cache, without which a table is built anew.
    Raises KernelError for tensors unlike ``layout`` and for float8 on a GPU that has none.
    """
    check_tensors(tensors, layout)
    strided: list[torch.Tensor] = []
    if not all_plain(tensors):
        strided = [tensor for tensor in tensors if not has_plain_memory(tensor)]
        tensors = [plain_memory(tensor) for tensor in tensors]
    report = (
        CopyReport(bytes_copied=sum([each.nbytes for each in strided]), launches=len(strided))
        if strided
        else None
    )
    if layout.is_plain_tensor and message is None:
        return Packed(tensors[0], report or CopyReport(bytes_without_copy=tensors[0].nbytes))
    device = tensors[0].device
    if message is None:
        message = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    check_buffer(message, layout.num_bytes, device)
    start = message.data_ptr()
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    moved = tuple(
        [
            wire != Wire.SAME or address != start + offset
            for address, wire, offset in zip(addresses, layout.wires, layout.offsets)
        ]
    )
    if HAS_TRITON and message.is_cuda:
        counted = launch_pack(message, addresses, layout, moved, tables)
    else:
        reference_pack(message, tensors, layout, moved)
        counted = count_copies(layout, moved, sum(moved))
    return Packed(message, counted if report is None else report + counted)


def unpack(
    message: torch.Tensor,
    layout: MessageLayout,
    *,
    output: torch.Tensor | None = None,
    tables: RecordTables | None = None,
) -> Unpacked:
    """The tensors of ``message``: views of it, except for those whose dtype changes, which one launch writes
    to ``output``.

    ``output``: a buffer of ``layout.output_bytes`` uint8, else a new one. The tensors are aligned to 128
    bytes if their buffers are.
    """
    if layout.is_plain_tensor:
        tensor = slot_view(message.view(-1).view(torch.uint8), 0, layout.shapes[0], layout.dtypes[0])
        return Unpacked([tensor], CopyReport(bytes_without_copy=tensor.nbytes))
    check_buffer(message, layout.num_bytes, message.device)
    moved = [wire != Wire.SAME for wire in layout.wires]
    if any(moved):
        if output is None:
            output = torch.empty(layout.output_bytes, dtype=torch.uint8, device=message.device)
        check_buffer(output, layout.output_bytes, message.device)
        check_float8(layout.wires, message.device)
    wide = message if output is None else output
    tensors = [
        slot_view(wide if converted else message, offset, shape, dtype)
        for converted, offset, shape, dtype in zip(moved, layout.output_offsets, layout.shapes, layout.dtypes)
    ]
    num_launches = 0
    if any(moved):
        converted = [index for index, narrowed in enumerate(moved) if narrowed]
        targets = [tensors[index] for index in converted]
        offsets, wires = (
            [layout.offsets[index] for index in converted],
            [layout.wires[index] for index in converted],
        )
        if HAS_TRITON and message.is_cuda:
            num_launches = launch_unpack(message, targets, offsets, wires, layout.scales_offset, tables)
        else:
            reference_unpack(message, targets, offsets, wires, layout.scales_offset)
            num_launches = len(targets)
    return Unpacked(tensors, count_copies(layout, moved, num_launches))


def launch_pack(
    message: torch.Tensor,
    addresses: tuple[int, ...],
    layout: MessageLayout,
    moved: tuple[bool, ...],
    tables: RecordTables | None,
    config: LaunchConfig | None = None,
) -> CopyReport:
    """Start the kernel on the contiguous tensors of ``layout`` at ``addresses``, those that are ``moved``: one launch,
    or none if nothing moves.
    """
    config = config or choose_config(message.numel())

    def build() -> tuple[torch.Tensor, int, int, CopyReport]:
        numels = [math.prod(shape) for shape in layout.shapes]
        records = _records(addresses, numels, layout.dtypes, layout.offsets, layout.wires, moved, config)
        kinds = _kind_bits(layout.wires, layout.dtypes, moved)
        return (
            upload(records, message.device),
            len(records),
            kinds,
            count_copies(layout, moved, len(records) > 0),
        )

    key = ("pack", config.block, addresses, layout, moved)
    table, num_chunks, kinds, report = (tables or RecordTables()).kept(key, message.device, build)
    if num_chunks == 0:
        return report
    with on_device(message):
        _pack_kernel[(num_chunks,)](
            message,
            table,
            layout.scales_offset,
            kinds=kinds,
            block=config.block,
            lanes=32 * config.num_warps,
            simulated=SIMULATED,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    return report


def launch_unpack(
    message: torch.Tensor,
    targets: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wires: Sequence[int],
    scales_offset: int,
    tables: RecordTables | None,
    config: LaunchConfig | None = None,
) -> int:
    """Start the kernel that fills ``targets``, and give the number of launches: one, or none if all are
    empty.
    """
    config = config or choose_config(message.numel())
    # Relative to the first target: with all of them in one buffer the table serves any buffer.
    first = targets[0].data_ptr()
    places = tuple([target.data_ptr() - first for target in targets])
    numels, dtypes = (
        tuple([target.numel() for target in targets]),
        tuple([target.dtype for target in targets]),
    )

    def build() -> np.ndarray:
        return _records(places, numels, dtypes, offsets, wires, [True] * len(targets), config)

    key = ("unpack", config, places, numels, dtypes, tuple(offsets), tuple(wires))
    table = (tables or RecordTables()).get(key, message.device, build)
    if table.shape[0] == 0:
        return 0
    with on_device(message):
        _unpack_kernel[(table.shape[0],)](
            message,
            targets[0].view(-1).view(torch.uint8),
            table,
            scales_offset,
            kinds=sum({1 << _kind(wire, dtype) for wire, dtype in zip(wires, dtypes)}),
            block=config.block,
            lanes=32 * config.num_warps,
            simulated=SIMULATED,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    return 1


@functools.lru_cache(maxsize=1024)
def _kind_bits(wires: tuple[int, ...], dtypes: tuple[torch.dtype, ...], moved: tuple[bool, ...]) -> int:
    return sum({1 << _kind(wire, dtype) for wire, dtype, move in zip(wires, dtypes, moved) if move})


def _kind(wire: int, dtype: torch.dtype) -> int:
    return COPY if wire == Wire.SAME else KINDS[Wire(wire), dtype]


def _records(
    addresses: Sequence[int],
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    offsets: Sequence[int],
    wires: Sequence[int],
    moved: Sequence[bool],
    config: LaunchConfig,
) -> np.ndarray:
    spans = []
    for address, numel, dtype, offset, wire, move in zip(addresses, numels, dtypes, offsets, wires, moved):
        if not move:
            continue
        if wire == Wire.SAME:
            spans.append(Span(address, offset, numel * dtype.itemsize, COPY, 1, 1, 4 * config.block))
        else:
            step = wire_item_bytes(dtype, Wire(wire))
            spans.append(Span(address, offset, numel, _kind(wire, dtype), dtype.itemsize, step, config.block))
    return make_records(spans)
