"""Turns the values of an edge into messages between ranks, and messages back into values.

In: tensors of one slice (the rows that this rank holds), the edge's values and the pieces to exchange. Out:
one message for each
piece: the tensor itself where an edge has one value, else one packed buffer; on the other side views of what
came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rannc_backend.ir.exchange import Value
from rannc_backend.kernels.boundary_pack import pack, pack_message, plan_message
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.runtime.rows import Piece

RowsTensors = list[torch.Tensor]
"""One tensor per value of the edge, rows first: of `Value.rows_shape`."""


AcquireMessage = Callable[[MessageLayout], tuple[torch.Tensor, list[torch.Tensor]]]
"""Memory to receive a message into, and the message's values in it."""


def layout_of(values: Sequence[Value], num_rows: int) -> MessageLayout:
    """How ``num_rows`` rows of an edge's values lie in a message."""
    return plan_message([value.rows_shape(num_rows) for value in values], [value.dtype for value in values])


def slice_rows(
    tensors: Sequence[torch.Tensor], values: Sequence[Value], start: int, piece: Piece
) -> RowsTensors:
    """Rows of ``piece`` out of ``tensors``, whose first row is global row ``start``."""
    rows = [
        tensor if value.is_row_major else value.to_rows(tensor)
        for value, tensor in zip(values, tensors, strict=True)
    ]
    first, last = piece.start - start, piece.stop - start
    if first == 0:
        return [each if each.shape[0] == last else each[:last] for each in rows]
    return [each[first:last] for each in rows]


def make_message(rows: RowsTensors, layout: MessageLayout) -> torch.Tensor:
    """One contiguous tensor with all of ``rows``, which must fit the layout: the receiver has made room for
    just that.
    """
    if layout.is_plain_tensor:
        return pack(rows, layout).message
    return pack_message(rows, layout)


class Incoming(NamedTuple):
    """A receive buffer of known size for the rows of one piece."""

    piece: Piece
    buffer: torch.Tensor
    views: RowsTensors


def make_incoming(layout: MessageLayout, piece: Piece, acquire_message: AcquireMessage) -> Incoming:
    """A buffer that fits what :func:`make_message` makes of ``piece`` on the sending rank."""
    buffer, views = acquire_message(layout)
    return Incoming(piece, buffer, views)


def assemble(
    values: Sequence[Value],
    arrived: Sequence[tuple[Piece, RowsTensors]],
    start: int,
    stop: int,
    *,
    overlapping: bool = False,
) -> list[torch.Tensor]:
    """The values of rows [start, stop) from pieces that cover them.

    ``overlapping``: several peers may send gradients of the same rows, and their sum is wanted.
    """
    arrived = sorted(arrived, key=lambda entry: entry[0].start)
    if overlapping and sum(piece.stop - piece.start for piece, _ in arrived) != stop - start:
        return [_sum_pieces(value, i, arrived, start, stop) for i, value in enumerate(values)]
    assert arrived and arrived[0][0].start == start and arrived[-1][0].stop == stop, (
        f"rows {start}:{stop} not covered"
    )
    if len(arrived) == 1:
        return [value.from_rows(rows) for value, rows in zip(values, arrived[0][1], strict=True)]
    return [value.from_rows(torch.cat([rows[i] for _, rows in arrived])) for i, value in enumerate(values)]


def _sum_pieces(
    value: Value, index: int, arrived: Sequence[tuple[Piece, RowsTensors]], start: int, stop: int
) -> torch.Tensor:
    total: torch.Tensor | None = None
    for piece, rows in arrived:
        if total is None:
            total = rows[index].new_zeros((stop - start, *rows[index].shape[1:]))
        total[piece.start - start : piece.stop - start] += rows[index]
    assert total is not None, f"no rows of {value.name} came"
    return value.from_rows(total)
