"""Who talks to whom: the edge table, and the messages that a phase sends over it.

In: stage numbers and counts of values. Out: `EdgeSpec` and, for a phase, the channels that carry messages and
what each compute action needs and makes.

Terms. A *phase* is what one call of a program does: "train" (forwards and backwards, the loss is inside),
"forward" (forwards only, saved values are kept), "backward" (the backwards of an earlier "forward", gradients
come from outside) or "infer" (forwards only, nothing is kept). Lane, channel and endpoint are explained in
`ir/action.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, INPUT, OUTPUT, Channel

Phase = Literal["train", "forward", "backward", "infer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSpec:
    """Values that `src` makes and `dst` uses; gradients come back over the same edge.

    `src` is a stage or INPUT (all ranks' input rows), `dst` a later stage or OUTPUT (all ranks' output rows).
    Bytes are per batch row, all values of the edge together.
    """

    src: int
    dst: int
    num_forward_values: int
    num_gradient_values: int = 0
    forward_bytes_per_row: float = 0
    gradient_bytes_per_row: float = 0

    def __post_init__(self) -> None:
        if self.src == OUTPUT or self.dst == INPUT or min(self.src, self.dst) < OUTPUT:
            raise ValueError(
                f"edge {self.src} -> {self.dst} must lead from a stage or INPUT to a stage or OUTPUT"
            )
        if self.src == INPUT and self.dst == OUTPUT:
            raise ValueError("an edge from INPUT to OUTPUT passes no stage")
        if 0 <= self.dst <= self.src:
            raise ValueError(f"edge {self.src} -> {self.dst} must lead to a later stage")
        if min(self.num_forward_values, self.num_gradient_values) < 0:
            raise ValueError(f"edge {self.src} -> {self.dst} has a negative number of values")


def chain_edges(num_stages: int) -> list[EdgeSpec]:
    """Those of a chain: each stage feeds the next.

    Returns:
        One edge from each stage but the last.
    """
    return [
        EdgeSpec(src=stage, dst=stage + 1, num_forward_values=1, num_gradient_values=1)
        for stage in range(num_stages - 1)
    ]


def active_channels(edges: Iterable[EdgeSpec], phase: Phase) -> tuple[Channel, ...]:
    """The channels that carry one message per micro-batch in `phase`, sorted.

    Gradients of row outputs exist only in "backward": in "train" the loss is inside and nothing comes from
    outside.
    """
    channels: list[Channel] = []
    for edge in edges:
        if phase != "backward" and edge.num_forward_values:
            channels.append(Channel(edge.src, edge.dst, FORWARD_VALUES))
        has_gradients = phase == "backward" or (phase == "train" and edge.dst != OUTPUT)
        if has_gradients and edge.num_gradient_values:
            channels.append(Channel(edge.dst, edge.src, GRADIENTS))
    if len(set(channels)) < len(channels):
        raise ValueError("the edge table lists an edge twice")
    return tuple(sorted(channels))


def is_training(phase: Phase) -> bool:
    """True for the phases that run backwards and reduce gradients."""
    return phase in ("train", "backward")
