"""Where each tensor lies in a message.

In: shapes, dtypes and wire formats. Out: byte offsets, sizes, and views of a buffer. Sender and receiver
compute the same layout.

Every tensor starts at a multiple of 128 bytes, so that a view of it is aligned for any kernel. Tensors in
FLOAT8 lie first, and behind all tensors lies one float32 scale per 128 elements of them: the scale of the
elements at byte b is number b / 128.

Terms. The *wire format* of a tensor is how it travels: SAME (its bytes), BFLOAT16, FLOAT16, or FLOAT8 (e4m3 with
scales).
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rannc_backend.kernels.record_table import KernelError

ALIGNMENT_BYTES = 128
GROUP_ELEMENTS = 128
"""Elements that share a scale."""

Shape = Sequence[int]


class Wire(enum.IntEnum):
    """How a tensor travels."""

    SAME = 0
    BFLOAT16 = 1
    FLOAT8 = 2
    FLOAT16 = 3

    __hash__ = int.__hash__  # that of Enum is a function of Python, and tables are found by wires


WIRES = {"same": Wire.SAME, "bf16": Wire.BFLOAT16, "fp16": Wire.FLOAT16, "fp8": Wire.FLOAT8}
"""By what the option boundary_dtype says."""


NARROWED = {
    Wire.SAME: (),
    Wire.BFLOAT16: (torch.float32, torch.float64),
    Wire.FLOAT8: (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    Wire.FLOAT16: (torch.float32, torch.float64),
}
"""Dtypes that each format makes smaller; others are refused."""


def choose_wires(dtypes: Sequence[torch.dtype], wanted: Wire, *, backward: bool = False) -> tuple[Wire, ...]:
    """The format for each dtype when ``wanted`` is asked for a whole edge.

    Gradients are more delicate than activations and travel as BFLOAT16 where FLOAT8 is wanted. What a format
    does not make smaller (integers, bool, 16 bits under BFLOAT16 and FLOAT16) travels as it is.
    """
    if backward and wanted == Wire.FLOAT8:
        wanted = Wire.BFLOAT16
    return tuple(wanted if dtype in NARROWED[wanted] else Wire.SAME for dtype in dtypes)


def wire_item_bytes(dtype: torch.dtype, wire: Wire) -> int:
    """Bytes of one element in the message, scales apart."""
    return {Wire.SAME: dtype.itemsize, Wire.BFLOAT16: 2, Wire.FLOAT16: 2, Wire.FLOAT8: 1}[wire]


def share_on_wire(dtype: torch.dtype, wire: Wire) -> float:
    """Bytes that travel per byte of a large tensor, its scales included."""
    scale_bytes = 4 / GROUP_ELEMENTS if wire == Wire.FLOAT8 else 0.0
    return (wire_item_bytes(dtype, wire) + scale_bytes) / dtype.itemsize


def slot_elements(numel: int, dtype: torch.dtype) -> int:
    """Elements that a tensor of ``numel`` takes in a flat buffer of ``dtype`` whose next tensor is to be
    aligned, too.
    """
    step = ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // step) * step


def align(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment of a slot."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLayout:
    """Shapes, dtypes and wire formats of the tensors of a message, and where they lie in it, in bytes. Made
    by :func:`plan_message`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    wires: tuple[Wire, ...]
    offsets: tuple[int, ...]
    scales_offset: int
    num_bytes: int
    output_offsets: tuple[int, ...]
    """Where each tensor lies when it has been unpacked: in the message if it travels as SAME, else in a
    buffer for the others.
    """
    output_bytes: int
    wire_bytes: tuple[int, ...]
    """Bytes of each tensor in the message, its scales included."""
    strides: tuple[tuple[int, ...], ...]
    """Those of contiguous tensors of these shapes."""

    def __hash__(self) -> int:
        return hash((self.shapes, self.num_bytes))  # asked for with every message; equal layouts are few

    @property
    def is_plain_tensor(self) -> bool:
        """One tensor that travels as it is: its own memory is the message."""
        return len(self.shapes) == 1 and self.wires[0] == Wire.SAME

    @property
    def is_exact(self) -> bool:
        """All tensors travel as they are: a message can be read where it lies."""
        return not any(self.wires)

    def view(self, message: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor ``index`` of ``message`` (uint8, one dimension), which must travel as SAME; no copy."""
        assert self.wires[index] == Wire.SAME, f"tensor {index} travels as {self.wires[index].name}"
        return slot_view(message, self.offsets[index], self.shapes[index], self.dtypes[index])

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """All tensors of ``message``, which must travel as SAME; no copy."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = []
        for index, (offset, shape, dtype) in enumerate(zip(self.offsets, self.shapes, self.dtypes)):
            if dtype not in typed and message.numel() % dtype.itemsize == 0:
                typed[dtype] = message.view(dtype)
            if dtype in typed and self.wires[index] == Wire.SAME:
                whole = typed[dtype]
                found.append(
                    whole.as_strided(
                        shape, self.strides[index], whole.storage_offset() + offset // dtype.itemsize
                    )
                )
            else:
                found.append(self.view(message, index))
        return found


def slot_view(message: torch.Tensor, offset: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shape`` and ``dtype`` in the memory of ``message`` (uint8, one dimension) from byte
    ``offset`` on.
    """
    size = math.prod(shape) * dtype.itemsize
    return message[offset : offset + size].view(dtype).view(tuple(shape))


def plan_message(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], wires: Sequence[Wire] | None = None
) -> MessageLayout:
    """The layout of a message. ``wires``: one format per tensor, all SAME if left out.

    Raises KernelError for a format that does not fit a dtype.
    """
    wires = (Wire.SAME,) * len(shapes) if wires is None else tuple(wires)
    return _planned(tuple(map(tuple, shapes)), tuple(dtypes), wires)


# The same few messages are sent in every step.
@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], wires: tuple[Wire, ...]
) -> MessageLayout:
    for index, (dtype, wire) in enumerate(zip(dtypes, wires, strict=True)):
        if wire != Wire.SAME and dtype not in NARROWED[wire]:
            fitting = ", ".join(map(str, NARROWED[wire]))
            raise KernelError(
                f"tensor {index} of a message is {dtype}, which cannot travel as {wire.name}: that is for "
                f"{fitting}"
            )
    offsets = [0] * len(shapes)
    end = num_groups = 0
    # A stable sort: FLOAT8 first, otherwise in the order given.
    for index in sorted(range(len(shapes)), key=lambda index: wires[index] != Wire.FLOAT8):
        numel = math.prod(shapes[index])
        offsets[index] = end
        end += align(numel * wire_item_bytes(dtypes[index], wires[index]))
        if wires[index] == Wire.FLOAT8:
            num_groups += -(-numel // GROUP_ELEMENTS)
    output_offsets, output_bytes = list(offsets), 0
    for index, wire in enumerate(wires):
        if wire != Wire.SAME:
            output_offsets[index] = output_bytes
            output_bytes += align(math.prod(shapes[index]) * dtypes[index].itemsize)
    sizes = []
    for shape, dtype, wire in zip(shapes, dtypes, wires):
        numel = math.prod(shape)
        scales = 4 * -(-numel // GROUP_ELEMENTS) if wire == Wire.FLOAT8 else 0
        sizes.append(numel * wire_item_bytes(dtype, wire) + scales)
    return MessageLayout(
        shapes=shapes,
        dtypes=dtypes,
        wires=wires,
        offsets=tuple(offsets),
        scales_offset=end,
        num_bytes=end + align(4 * num_groups),
        output_offsets=tuple(output_offsets),
        output_bytes=output_bytes,
        wire_bytes=tuple(sizes),
        strides=tuple(map(_strides, shapes)),
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([math.prod(shape[place + 1 :]) for place in range(len(shape))])
