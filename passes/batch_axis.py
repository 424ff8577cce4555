"""Follow the rows of the batch through a functional ATen graph (work in progress: layouts are final)."""
from __future__ import annotations

from .layouts import Constant, Layout, PartialSum, Reduced, RowCount, RowIndex, Rows, Several, SliceStatistic

__all__ = ["Constant", "Layout", "PartialSum", "Reduced", "RowCount", "RowIndex", "Rows", "Several", "SliceStatistic"]
