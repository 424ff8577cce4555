"""The order of one rank: which of its messages is queued when, in a step with certain rows; and the routes that
messages can take.

In: the order of the messages of all lanes (`schedule/message_order.py`), the step's rows. Out: this rank's `QueuedMessage`s. Of a message
between two lanes, the pieces between their ranks have one order on all ranks: by row, then by sender and
receiver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rannc_backend.ir.action import INPUT, OUTPUT, Channel, OrderedMessage
from rannc_backend.ir.exchange import Edge
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.world import QueuedMessage, Ranks, Route


def lane_of_rank(rank: int, stage_ranks: Sequence[Sequence[int]]) -> int:
    """The lane of a rank: its place among the different ranks of stages; ranks without a stage share the lane after the
    last.
    """
    lanes = list(dict.fromkeys(map(tuple, stage_ranks)))
    return next((lane for lane, ranks in enumerate(lanes) if rank in ranks), len(lanes))


def queued_messages(
    ordered: Sequence[OrderedMessage], rank: int, rows: RowTable
) -> tuple[QueuedMessage, ...]:
    """The messages of ``rank`` in the order in which it queues them."""
    lane = lane_of_rank(rank, rows.stage_ranks)
    lanes = [lane_of_rank(other, rows.stage_ranks) for other in range(len(rows.local_rows))]
    result = []
    for message in ordered:
        if lane not in (message.sender, message.receiver):
            continue
        source, destination, name = message.channel.source, message.channel.destination, str(message.channel)
        found = []  # (first row, sender, receiver)
        if lane == message.sender:
            pieces = rows.pieces(source, destination, rank, message.micro_batch)
            found += [
                (piece.start, rank, piece.peer) for piece in pieces if lanes[piece.peer] == message.receiver
            ]
        if lane == message.receiver:
            pieces = rows.pieces(destination, source, rank, message.micro_batch)
            found += [
                (piece.start, piece.peer, rank) for piece in pieces if lanes[piece.peer] == message.sender
            ]
        for _, sender, receiver in sorted(set(found)):
            if sender != receiver:
                is_send = sender == rank
                place = message.sender_place if is_send else message.receiver_place
                result.append(QueuedMessage(place, name, receiver if is_send else sender, is_send))
    return tuple(result)


def routes_of(edges: Mapping[tuple[int, int], Edge], stage_ranks: Sequence[Ranks], size: int) -> list[Route]:
    """All channels that the edges can use with the ranks at their ends, in an order that is the same on every
    rank.
    """
    ends = {place: tuple(range(size)) for place in (INPUT, OUTPUT)} | dict(enumerate(stage_ranks))
    routes = []
    for src, dst in sorted(edges):
        routes.append(Route(str(Channel(src, dst, "F")), ends[src], ends[dst]))
        if edges[src, dst].gradient:
            routes.append(Route(str(Channel(dst, src, "B")), ends[dst], ends[src]))
    return routes
