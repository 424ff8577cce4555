"""Split a graph at its reductions over the batch (work in progress: data types are final)."""
from __future__ import annotations

from .batch_split import FIRST_ROW, GLOBAL_ROWS, RNG_SEED, BatchSplit, RowwiseOutput, UserOutput

__all__ = ["FIRST_ROW", "GLOBAL_ROWS", "RNG_SEED", "BatchSplit", "RowwiseOutput", "UserOutput"]
