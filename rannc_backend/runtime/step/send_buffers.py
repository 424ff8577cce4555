"""Memory of messages that hold several values: written where the values are computed, sent from there, used
again when the send is done.

In: channels, micro-batches, sizes. Out: buffers of bytes, and views of them in which a stage may write its
results. Terms: a buffer is *acquired* from before its values are computed until the action that ends their
send (``D``); a channel has as many buffers as it ever had sends in flight, which the schedule bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, Channel
from rannc_backend.ir.exchange import Edge, Value
from rannc_backend.kernels.boundary_pack import pack
from rannc_backend.kernels.kept_views import KeptViews
from rannc_backend.kernels.message_layout import MessageLayout, Wire
from rannc_backend.kernels.pack_reference import Packed
from rannc_backend.kernels.record_table import RecordTables
from rannc_backend.runtime.step.messages import RowsTensors, layout_of, wires_of

_Key = tuple[Channel, int, int]  # channel, micro-batch, receiving rank


@dataclass(slots=True)
class SendBuffers:
    """The buffers of one rank's messages to other stages, by channel."""

    device: torch.device
    tables: RecordTables = field(default_factory=RecordTables)
    _acquired: dict[_Key, KeptViews] = field(default_factory=dict)
    _free: dict[Channel, list[KeptViews]] = field(default_factory=dict)

    def begin(self) -> None:
        """A program begins. What a failed one has acquired may still be on its way, and is never used
        again.
        """
        self._acquired.clear()

    def destinations(
        self,
        channel: Channel,
        micro_batch: int,
        peer: int,
        values: Sequence[Value],
        num_rows: int,
        stored: Mapping[str, int],
    ) -> dict[int, torch.Tensor]:
        """Acquire the buffer of a message of ``num_rows`` rows; gives views of it as the values that
        ``stored`` names, by their numbers.
        """
        layout = layout_of(values, num_rows)
        _, views = self._acquire((channel, micro_batch, peer), layout.num_bytes).message(layout)
        return {
            stored[value.name]: value.from_rows(view)
            for value, view in zip(values, views, strict=True)
            if value.name in stored
        }

    def pack(
        self, channel: Channel, micro_batch: int, peer: int, rows: RowsTensors, layout: MessageLayout
    ) -> Packed:
        """The message to ``peer``: what lies in its buffer already stays there, the rest is copied to it in
        one launch.

        ``layout``: what the receiver expects; other rows are refused.
        """
        if layout.is_plain_tensor:
            return pack(rows, layout)
        key = (channel, micro_batch, peer)
        buffer = self._acquired.get(key) or self._acquire(key, layout.num_bytes)
        return pack(rows, layout, message=buffer.bytes_of(layout), tables=self.tables)

    def done(self, channel: Channel, micro_batch: int) -> None:
        """The messages of a micro-batch have been sent: their buffers may be written again."""
        for key in [key for key in self._acquired if key[:2] == (channel, micro_batch)]:
            self._free.setdefault(channel, []).append(self._acquired.pop(key))

    @property
    def num_buffers(self) -> dict[Channel, int]:
        """How many buffers each channel has, acquired or free."""
        counts = {channel: len(buffers) for channel, buffers in self._free.items()}
        for channel, _, _ in self._acquired:
            counts[channel] = counts.get(channel, 0) + 1
        return counts

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers, acquired or free: they stay from step to step."""
        buffers = [
            *self._acquired.values(),
            *(buffer for buffers in self._free.values() for buffer in buffers),
        ]
        return [buffer.memory for buffer in buffers]

    def _acquire(self, key: _Key, num_bytes: int) -> KeptViews:
        assert key not in self._acquired, (
            f"the message of {key[0]}, micro-batch {key[1]} to rank {key[2]} is on its way already"
        )
        free = self._free.setdefault(key[0], [])
        fitting = [number for number, buffer in enumerate(free) if buffer.memory.numel() >= num_bytes]
        if fitting:
            buffer = free.pop(fitting[0])
        else:
            if free:
                free.pop()  # batches have become larger
            buffer = KeptViews(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        self._acquired[key] = buffer
        return buffer


def storable_values(messages: Mapping[int, Collection[Value]]) -> frozenset[str]:
    """Of the values that a stage sends to each of several endpoints, those that it may write into the
    message.

    These share a message with others, have their samples one after the other, and travel nowhere else.
    """
    num_messages = Counter(value.name for values in messages.values() for value in values)
    return frozenset(
        value.name
        for endpoint, values in messages.items()
        for value in values
        if endpoint >= 0
        and len(values) > 1
        and num_messages[value.name] == 1
        and value.dim == 0
        and value.outer == 1
    )


def stored_names(
    edges: Mapping[tuple[int, int], Edge],
    stage_index: int,
    output_names: Collection[str],
    wire: Wire = Wire.SAME,
) -> tuple[frozenset[str], frozenset[str]]:
    """Names of a stage's outputs, and of inputs of which it makes the gradients, that it may write into
    messages.

    ``output_names``: of all its outputs; those that serve two purposes are left out. ``wire``: how floating values travel
    between stages; messages in which some are rounded are packed.
    """

    def is_exact(channel: Channel, values: Sequence[Value]) -> bool:
        return not any(wires_of(channel, values, wire))

    forward = storable_values(
        {
            dst: edge.forward
            for (src, dst), edge in edges.items()
            if src == stage_index and is_exact(Channel(src, dst, FORWARD_VALUES), edge.forward)
        }
    )
    once = frozenset(name for name, number in Counter(output_names).items() if number == 1)
    gradients = storable_values(
        {
            src: edge.gradient
            for (src, dst), edge in edges.items()
            if dst == stage_index and is_exact(Channel(dst, src, GRADIENTS), edge.gradient)
        }
    )
    return forward & once, gradients
