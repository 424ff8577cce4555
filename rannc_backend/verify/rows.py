"""How the rows of the ranks lie in a value of the whole batch.

In: the shapes of a value on each rank and in the reference. Out: a `Layout`, which takes a rank's part out of
the whole, and puts gradients of the parts together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_OUTER = range(1, 17)  # nobody puts more values of a row under one another


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each rank's rows are.

    Attributes:
        dim: the dimension of the rows; None: every rank has the whole value.
        outer: how often all rows of the batch follow one another in it (2 where a model has put two values of
        each row under one another).
        sizes: elements of that dimension on each rank, for each of ``outer``.
    """

    dim: int | None
    outer: int = 1
    sizes: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return self.dim is None

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the value of the whole batch; of the value itself where it does not fit, to be
        compared with what differs.
        """
        if self.dim is None:
            return whole
        start = sum(self.sizes[:rank])
        pieces = [
            block.narrow(self.dim, start, self.sizes[rank]) for block in whole.chunk(self.outer, self.dim)
        ]
        return pieces[0] if self.outer == 1 else torch.cat(pieces, self.dim)

    def gradient(self, parts: Sequence[Tensor | None], whole: Tensor, *, averages: bool) -> Tensor:
        """The incoming gradient of the whole value from those of the parts: put together, and averaged over
        the ranks.

        A whole value has the mean in any case, rows have the sum unless ``averages``.
        """
        if self.dim is None:
            total = torch.zeros_like(whole)
            for part in parts:
                if part is not None:
                    total += part.to(whole.device, whole.dtype)
            return total / len(parts)
        gradient = torch.zeros_like(whole)
        for rank, part in enumerate(parts):
            if part is None:
                continue
            blocks = part.to(whole.device, whole.dtype).chunk(self.outer, self.dim)
            for block, place in zip(blocks, gradient.chunk(self.outer, self.dim), strict=True):
                place.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank]).copy_(block)
        return gradient / len(parts) if averages else gradient


def layout_of(parts: Sequence[Tensor], whole: Tensor) -> Layout:
    """The layout in which the ranks' parts make up the whole value.

    Where rows follow one another more than once in a dimension, shapes do not tell how often: the values do.
    """
    if all(part.shape == whole.shape for part in parts) or any(part.dim() != whole.dim() for part in parts):
        return Layout(None)
    for dim in range(whole.dim()):
        sizes = [part.shape[dim] for part in parts]
        others = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        if sum(sizes) == whole.shape[dim] and all(
            other == (*whole.shape[:dim], *whole.shape[dim + 1 :]) for other in others
        ):
            return _nearest_layout(dim, sizes, parts, whole)
    return Layout(None)


def _nearest_layout(dim: int, sizes: Sequence[int], parts: Sequence[Tensor], whole: Tensor) -> Layout:
    possible = [
        Layout(dim, outer, tuple(size // outer for size in sizes)) for outer in _common_divisors(sizes)
    ]
    if len(possible) == 1:
        return possible[0]
    # Nearly always the first one fits, and the others are not tried.
    for layout in possible:
        if all(_is_near(part, layout.part(whole.detach().cpu(), rank)) for rank, part in enumerate(parts)):
            return layout
    return possible[0]


def _is_near(part: Tensor, other: Tensor) -> bool:
    return torch.allclose(
        part.to(torch.complex128), other.to(torch.complex128), rtol=1e-3, atol=1e-6, equal_nan=True
    )


def _common_divisors(sizes: Sequence[int]) -> list[int]:
    common = math.gcd(*sizes) or 1
    return [divisor for divisor in _OUTER if common % divisor == 0]
