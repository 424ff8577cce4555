"""What packing and unpacking mean, in torch's own operators, and which tensors they take.

In: tensors, a layout of their message. Out: the bytes that the kernels of `boundary_pack` must make, or an
error for tensors that do not fit the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rannc_backend.kernels.message_layout import (
    GROUP_ELEMENTS,
    MessageLayout,
    Wire,
    slot_view,
)
from rannc_backend.kernels.record_table import (
    CopyReport,
    KernelError,
)

FLOAT8_MAX = 448.0
HALVES: dict[int, torch.dtype] = {Wire.BFLOAT16: torch.bfloat16, Wire.FLOAT16: torch.float16}
"""Formats that are a cast, with the dtype."""


SMALLEST_MAGNITUDE = 1e-30
"""Groups of smaller values are scaled as if they held this, so that 448 / magnitude stays finite."""


FLOAT8_CAPABILITY = (8, 9)


class Packed(NamedTuple):
    """A message and what it took to make it."""

    message: torch.Tensor
    report: CopyReport


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The tensors of a message, in the layout's order, and what it took to get them."""

    tensors: list[torch.Tensor]
    report: CopyReport


def count_copies(layout: MessageLayout, moved: Sequence[bool], num_launches: int) -> CopyReport:
    bytes_copied = sum([size for size, was_moved in zip(layout.wire_bytes, moved) if was_moved])
    return CopyReport(bytes_copied, sum(layout.wire_bytes) - bytes_copied, num_launches)


def check_tensors(tensors: Sequence[torch.Tensor], layout: MessageLayout) -> None:
    if (
        tuple([tensor.shape for tensor in tensors]) != layout.shapes
        or tuple([tensor.dtype for tensor in tensors]) != layout.dtypes
    ):
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        raise KernelError(
            f"tensors {given} do not fit a message for {list(zip(layout.shapes, layout.dtypes))}"
        )
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            devices = sorted({str(each.device) for each in tensors})
            raise KernelError(f"the tensors of a message must be on one device, not on {devices}")
    check_float8(layout.wires, device)


def check_float8(wires: Sequence[Wire], device: torch.device) -> None:
    if device.type != "cuda" or Wire.FLOAT8 not in wires or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise KernelError(
            f"{name} has compute capability {capability[0]}.{capability[1]} and float8 messages need 8.9 or "
            "more; use bfloat16 there"
        )


def check_buffer(buffer: torch.Tensor, num_bytes: int, device: torch.device) -> None:
    if (
        buffer.dtype != torch.uint8
        or buffer.dim() != 1
        or not buffer.is_contiguous()
        or buffer.device != device
    ):
        raise KernelError(
            f"a buffer must be contiguous uint8 of one dimension on {device}, not {buffer.dtype} "
            f"{tuple(buffer.shape)} on {buffer.device}"
        )
    if buffer.numel() < num_bytes or buffer.data_ptr() % 16:
        raise KernelError(
            f"a buffer of {num_bytes} bytes, aligned to 16, is needed, not {buffer.numel()} bytes at "
            f"{buffer.data_ptr():#x}"
        )


def reference_pack(
    message: torch.Tensor, tensors: Sequence[torch.Tensor], layout: MessageLayout, moved: Sequence[bool]
) -> None:
    """What the kernel does, in plain PyTorch."""
    for tensor, offset, wire, move in zip(tensors, layout.offsets, layout.wires, moved):
        if not move or tensor.numel() == 0:
            continue
        if wire == Wire.SAME:
            slot_view(message, offset, tensor.shape, tensor.dtype).copy_(tensor)
        elif wire in HALVES:
            slot_view(message, offset, tensor.shape, HALVES[wire]).copy_(tensor)
        else:
            values, scales = quantize(tensor)
            slot_view(message, offset, values.shape, torch.float8_e4m3fn).copy_(values)
            slot_view(
                message, layout.scales_offset + offset // GROUP_ELEMENTS * 4, scales.shape, torch.float32
            ).copy_(scales)


def reference_unpack(
    message: torch.Tensor,
    targets: Sequence[torch.Tensor],
    offsets: Sequence[int],
    wires: Sequence[int],
    scales_offset: int,
) -> None:
    """What the kernel does, in plain PyTorch."""
    for target, offset, wire in zip(targets, offsets, wires):
        if target.numel() == 0:
            continue
        if wire in HALVES:
            target.copy_(slot_view(message, offset, target.shape, HALVES[wire]))
        else:
            num_groups = -(-target.numel() // GROUP_ELEMENTS)
            scales = slot_view(
                message, scales_offset + offset // GROUP_ELEMENTS * 4, (num_groups,), torch.float32
            )
            values = slot_view(message, offset, target.shape, torch.float8_e4m3fn).to(torch.float32)
            target.copy_(
                values * scales.repeat_interleave(GROUP_ELEMENTS)[: target.numel()].view(target.shape)
            )


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values [numel] and float32 scales [groups] of ``tensor``, which is not empty."""
    values = torch.nn.functional.pad(
        tensor.reshape(-1).to(torch.float32), (0, -tensor.numel() % GROUP_ELEMENTS)
    )
    groups = values.view(-1, GROUP_ELEMENTS)
    largest = groups.abs().masked_fill(groups.isnan(), 0.0).amax(dim=1).clamp(min=SMALLEST_MAGNITUDE)
    scaled = groups * torch.div(torch.full_like(largest, FLOAT8_MAX), largest)[:, None]
    return scaled.view(-1)[: tensor.numel()].to(torch.float8_e4m3fn), largest * (1.0 / FLOAT8_MAX)
