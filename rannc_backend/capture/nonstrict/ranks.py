"""What a capture without Dynamo asks of the job that it is for.

In: nothing. Out: `Ranks`; by default one rank, which has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rannc_backend.capture.aten_trace import StridesOf

Exchange = Callable[[Any], list[Any]]
"""Every rank's payload of plain numbers and lists, in rank order; of one rank, or where each has the whole
batch, one payload.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Collective but for the first and the last two; every rank asks the same.

    Members:
        strides_of: strides by which to trace a parameter.
        global_rows: the batch size of all ranks, from this one's.
        exchange: see `Exchange`.
        is_absent: whether a tensor of the module has no values on this rank.
        device: trace as if the model and its inputs were there; None: where they are.
    """

    strides_of: StridesOf = torch.Tensor.stride
    global_rows: Callable[[int], int] = int
    exchange: Exchange = lambda payload: [payload]
    is_absent: Callable[[torch.Tensor], bool] = lambda tensor: False
    device: torch.device | None = None


ALONE = Ranks()
