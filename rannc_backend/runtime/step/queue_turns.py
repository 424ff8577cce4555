"""The turns of one rank: which of its messages is queued when, in a step with certain rows.

In: the turns of all lanes (`schedule/turns.py`), the step's rows. Out: this rank's `QueueTurn`s. Of a message
between two lanes, the pieces between their ranks have one order on all ranks: by row, then by sender and
receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

from rannc_backend.ir.action import Turn
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.world import QueueTurn


def lane_of_rank(rank: int, stage_ranks: Sequence[Sequence[int]]) -> int:
    """The lane of a rank: its stage; ranks without one share the lane after the last."""
    return next((stage for stage, ranks in enumerate(stage_ranks) if rank in ranks), len(stage_ranks))


def queue_turns(turns: Sequence[Turn], rank: int, rows: RowTable) -> tuple[QueueTurn, ...]:
    """The messages of ``rank`` in the order in which it queues them."""
    lane = lane_of_rank(rank, rows.stage_ranks)
    lanes = [lane_of_rank(other, rows.stage_ranks) for other in range(len(rows.local_rows))]
    result = []
    for turn in turns:
        if lane not in (turn.sender, turn.receiver):
            continue
        source, destination, name = turn.channel.source, turn.channel.destination, str(turn.channel)
        found = []  # (first row, sender, receiver)
        if lane == turn.sender:
            pieces = rows.pieces(source, destination, rank, turn.micro_batch)
            found += [
                (piece.start, rank, piece.peer) for piece in pieces if lanes[piece.peer] == turn.receiver
            ]
        if lane == turn.receiver:
            pieces = rows.pieces(destination, source, rank, turn.micro_batch)
            found += [(piece.start, piece.peer, rank) for piece in pieces if lanes[piece.peer] == turn.sender]
        for _, sender, receiver in sorted(set(found)):
            if sender != receiver:
                is_send = sender == rank
                place = turn.sender_place if is_send else turn.receiver_place
                result.append(QueueTurn(place, name, receiver if is_send else sender, is_send))
    return tuple(result)
