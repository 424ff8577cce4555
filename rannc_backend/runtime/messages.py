"""Turns the values of an edge into messages between ranks, and messages back into values.

In: tensors of one slice (the rows that this rank holds), the edge's values and the pieces to exchange. Out: one message for each
piece: the tensor itself where an edge has one value, else one packed buffer; on the other side views of what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rannc_backend.ir.exchange import Value
from rannc_backend.kernels.boundary_pack import pack_message, plan_message
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.rows import Piece

RowsTensors = list[torch.Tensor]
"""One [rows, elements_per_row] tensor per value of the edge."""


def slice_rows(tensors: Sequence[torch.Tensor], values: Sequence[Value], start: int, piece: Piece) -> RowsTensors:
    """Rows of ``piece`` out of ``tensors``, whose first row is global row ``start``."""
    if piece.start == start:
        rows = [value.to_rows(tensor) for value, tensor in zip(values, tensors, strict=True)]
        length = piece.stop - start
        return [each if each.shape[0] == length else each[:length] for each in rows]
    return [
        value.to_rows(tensor)[piece.start - start : piece.stop - start]
        for value, tensor in zip(values, tensors, strict=True)
    ]


def make_message(rows: RowsTensors) -> torch.Tensor:
    """One contiguous tensor with all of ``rows``."""
    if len(rows) == 1:
        return plain_memory(rows[0])
    return pack_message(rows)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A receive buffer of known size for the rows of one piece."""

    piece: Piece
    buffer: torch.Tensor
    views: RowsTensors


def make_incoming(values: Sequence[Value], piece: Piece, lend: Callable[[int], torch.Tensor]) -> Incoming:
    """A buffer that fits what :func:`make_message` makes of ``piece`` on the sending rank; ``lend`` gives so many bytes."""
    num_rows = piece.stop - piece.start
    shapes = [(num_rows, value.elements_per_row) for value in values]
    if len(values) == 1:
        dtype = values[0].dtype
        buffer = lend(math.prod(shapes[0]) * dtype.itemsize).view(dtype).view(shapes[0])
        return Incoming(piece, buffer, [buffer])
    layout = plan_message(shapes, [value.dtype for value in values])
    buffer = lend(layout.num_bytes)
    return Incoming(piece, buffer, [layout.view(buffer, index) for index in range(len(values))])


def assemble(
    values: Sequence[Value], arrived: Sequence[tuple[Piece, RowsTensors]], start: int, stop: int, *, overlapping: bool = False
) -> list[torch.Tensor]:
    """The values of rows [start, stop) from pieces that cover them.

    ``overlapping``: several peers may send gradients of the same rows, and their sum is wanted.
    """
    arrived = sorted(arrived, key=lambda entry: entry[0].start)
    if overlapping and sum(piece.stop - piece.start for piece, _ in arrived) != stop - start:
        return [_sum_pieces(value, i, arrived, start, stop) for i, value in enumerate(values)]
    assert arrived and arrived[0][0].start == start and arrived[-1][0].stop == stop, f"rows {start}:{stop} not covered"
    if len(arrived) == 1:
        return [value.from_rows(rows) for value, rows in zip(values, arrived[0][1], strict=True)]
    return [value.from_rows(torch.cat([rows[i] for _, rows in arrived])) for i, value in enumerate(values)]


def _sum_pieces(
    value: Value, index: int, arrived: Sequence[tuple[Piece, RowsTensors]], start: int, stop: int
) -> torch.Tensor:
    total: torch.Tensor | None = None
    for piece, rows in arrived:
        if total is None:
            total = rows[index].new_zeros((stop - start, value.elements_per_row))
        total[piece.start - start : piece.stop - start] += rows[index]
    assert total is not None, f"no rows of {value.name} came"
    return value.from_rows(total)
