"""Where the backward of a stage puts the gradients of its parameters.

In: who sums them over micro-batches (a `GradientSink`, gradient buckets in production). Out: for one
backward, the views to write and the accumulate of all (see `kernels.gradient_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from rannc_backend.kernels.gradient_writes import FIRST, LATER


class GradientSink(Protocol):
    """Gives out the memory in which gradients are summed, and is told when a micro-batch's part is in it."""

    def target(self, position: int) -> tuple[Tensor, bool]:
        """Where the gradient of a parameter goes: contiguous, in its shape and the dtype of sums; and whether a
        sum is there to add to.
        """

    def targets(self, positions: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
        """`target` of several, as two lists."""

    def made(self, position: int) -> None:
        """The gradient of a parameter has been written; called once per backward and parameter, in the order
        in which that happens.
        """

    def all_made(self, positions: Sequence[int]) -> None:
        """`made` of several, in this order."""

    def keep_rows(self, position: int, index: Tensor, rows: Tensor) -> None:
        """See `kernels.gradient_writes.Listener`: of a stage that was compiled for sparse gradients."""


class ScratchGradients:
    """A sink in memory of its own, for measurements and tests: the first backward writes, later ones add.

    Args:
        shapes: tensors (fakes will do) that look like the parameters, by position.
        dtypes: of the sums, where they are not the parameters'.
        keep_adding: False: every backward writes.

    Attributes:
        order: positions in the order in which gradients were made.
        rows: what was kept of sparse gradients, by position.
    """

    def __init__(
        self,
        shapes: Mapping[int, Tensor],
        dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
        *,
        keep_adding: bool = True,
    ) -> None:
        self._views = {
            p: torch.empty(tuple(v.shape), dtype=dtypes.get(p, v.dtype), device=v.device)
            for p, v in shapes.items()
        }
        self._keep_adding = keep_adding
        self.order: list[int] = []
        self.rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.on_made: Callable[[int], None] = lambda position: None

    @property
    def gradients(self) -> dict[int, Tensor]:
        """What has been made, by position."""
        return {position: self._views[position] for position in self.order}

    def target(self, position: int) -> tuple[Tensor, bool]:
        """See `GradientSink`."""
        return self._views[position], self._keep_adding and position in self.order

    def made(self, position: int) -> None:
        """See `GradientSink`."""
        self.order.append(position)
        self.on_made(position)

    def targets(self, positions: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
        """See `GradientSink`."""
        return [self._views[position] for position in positions], [
            self.target(position)[1] for position in positions
        ]

    def keep_rows(self, position: int, index: Tensor, rows: Tensor) -> None:
        """See `GradientSink`."""
        self.rows.setdefault(position, []).append((index, rows))

    def all_made(self, positions: Sequence[int]) -> None:
        """See `GradientSink`."""
        for position in positions:
            self.made(position)


def open_targets(sink: GradientSink, positions: Sequence[int]) -> tuple[int, list[Tensor]]:
    """The accumulate and the views of one backward; where some views hold a sum and others do not, the others
    are set to zero.
    """
    views, holding = sink.targets(positions)
    if not any(holding):
        return FIRST, views
    if not all(holding):
        for view, holds in zip(views, holding, strict=True):
            if not holds:
                view.zero_()
    return LATER, views
