"""Turns the values of an edge into messages between ranks, and messages back into values.

In: tensors of one slice (the rows that this rank holds), the edge's values and the pieces to exchange. Out:
one message for each
piece: the tensor itself where an edge has one value that travels as it is, else one packed buffer; on the other side
views of what came, or what is unpacked from it where values travel in fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.ir.action import GRADIENTS, Channel
from rannc_backend.ir.exchange import Value
from rannc_backend.kernels.boundary_pack import pack, plan_message, unpack
from rannc_backend.kernels.message_layout import WIRES, MessageLayout, Wire, choose_wires
from rannc_backend.kernels.pack_reference import Unpacked, check_float8
from rannc_backend.kernels.record_table import KernelError, RecordTables
from rannc_backend.runtime.rows import Piece

RowsTensors = list[torch.Tensor]
"""One tensor per value of the edge, rows first: of `Value.rows_shape`."""


AcquireMessage = Callable[[MessageLayout], tuple[torch.Tensor, list[torch.Tensor]]]
"""Memory to receive a message into, and the message's values in it."""


def boundary_wire(name: str, device: torch.device) -> Wire:
    """The format that the option boundary_dtype asks for. Raises UserInputError where the device has none."""
    try:
        check_float8([WIRES[name]], device)
    except KernelError as error:
        raise UserInputError(str(error), cure="set boundary_dtype to 'bf16'.") from None
    return WIRES[name]


def wires_of(channel: Channel, values: Sequence[Value], wanted: Wire) -> tuple[Wire, ...]:
    """How values travel: as they are to and from the user, between stages as ``wanted`` where that is narrower."""
    is_between_stages = channel.source >= 0 and channel.destination >= 0
    return choose_wires(
        [value.dtype for value in values],
        wanted if is_between_stages else Wire.SAME,
        backward=channel.direction == GRADIENTS,
    )


def layout_of(values: Sequence[Value], num_rows: int, wires: Sequence[Wire] | None = None) -> MessageLayout:
    """How ``num_rows`` rows of an edge's values lie in a message; ``wires``: as `wires_of`, else as they are."""
    return plan_message(
        [value.rows_shape(num_rows) for value in values], [value.dtype for value in values], wires
    )


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
    return pack(rows, layout).message


class Incoming(NamedTuple):
    """A receive buffer of known size for the rows of one piece; ``views``: of its values, none where they must be
    unpacked.
    """

    piece: Piece
    buffer: torch.Tensor
    views: RowsTensors
    layout: MessageLayout

    def fill(self, values: Sequence[Value], examples: Mapping[str, torch.Tensor]) -> None:
        """Put a row for each value that is known into it, and zeros for the others."""
        rows = self.views or [
            torch.empty(shape, dtype=dtype, device=self.buffer.device)
            for shape, dtype in zip(self.layout.shapes, self.layout.dtypes, strict=True)
        ]
        for value, tensor in zip(values, rows, strict=True):
            if value.name in examples:
                value.to_rows(tensor).copy_(examples[value.name])  # the rows of a message are a view so
            else:
                tensor.zero_()
        if not self.views:
            pack(rows, self.layout, message=self.buffer)

    def unpacked(self, tables: RecordTables) -> Unpacked:
        """The values of a message that has come and must be unpacked."""
        return unpack(self.buffer, self.layout, tables=tables)


def make_incoming(layout: MessageLayout, piece: Piece, acquire_message: AcquireMessage) -> Incoming:
    """A buffer that fits what :func:`make_message` makes of ``piece`` on the sending rank."""
    buffer, views = acquire_message(layout)
    return Incoming(piece, buffer, views, layout)


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
