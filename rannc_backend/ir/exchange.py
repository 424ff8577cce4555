"""What travels between groups of ranks: values, their row layout, and the edges that carry them.

In: nothing but plain arguments. Out: frozen descriptions shared by the code that cuts graphs and the runtime
that moves tensors.

Terms. A *value* is a tensor of the row-wise graph, known by its node name on every rank. Its *row layout*
says where the samples
are: dimension ``dim`` has size ``outer * rows * inner`` and its index runs as (outer, row, inner). An
*endpoint* is a stage, or INPUT (all ranks as owners of their local input rows) or OUTPUT (all ranks as owners
of output rows). An *edge* carries the values that one endpoint makes and a later one uses; gradients travel
it backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor that crosses an edge. ``shape[dim]`` is -1; every other size is fixed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    outer: int = 1
    inner: int = 1
    elements_per_row: int = field(init=False, repr=False, compare=False)
    """Number of elements that one sample adds."""
    is_row_major: bool = field(init=False, repr=False, compare=False)
    """Whether a sample is an index of the first dimension: then a tensor of this value is its own rows, in
    their shape.
    """

    def __post_init__(self) -> None:
        assert self.shape[self.dim] == -1, (
            f"{self.name}: size of dimension {self.dim} must be -1, got {self.shape}"
        )
        number = (
            self.outer * self.inner * math.prod(size for i, size in enumerate(self.shape) if i != self.dim)
        )
        object.__setattr__(self, "elements_per_row", number)
        object.__setattr__(self, "is_row_major", self.dim == 0 and self.outer == 1 and self.inner == 1)

    def rows_shape(self, num_rows: int) -> tuple[int, ...]:
        """What the rows of this value look like in a message: of the value's own shape where they can be,
        else [rows, elements_per_row].
        """
        return (num_rows, *self.shape[1:]) if self.is_row_major else (num_rows, self.elements_per_row)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one sample adds."""
        return self.elements_per_row * self.dtype.itemsize

    def num_rows(self, tensor: torch.Tensor) -> int:
        """Samples in ``tensor``, a tensor of this value."""
        return tensor.shape[self.dim] // (self.outer * self.inner)

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as [rows, elements_per_row]; a view whenever the samples already lie one after the
        other.
        """
        if self.dim == 0 and self.outer == 1:
            return tensor.reshape(self.num_rows(tensor), self.elements_per_row)
        shape = tensor.shape
        split = tensor.reshape(
            *shape[: self.dim], self.outer, self.num_rows(tensor), self.inner, *shape[self.dim + 1 :]
        )
        return split.movedim(self.dim + 1, 0).reshape(-1, self.elements_per_row)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`to_rows`: [rows, elements_per_row] back to the value's own shape, contiguous.

        Rows that have :meth:`rows_shape` in the value's own shape are given back as they are.
        """
        if self.is_row_major and rows.shape[1:] == self.shape[1:] and rows.is_contiguous():
            return rows
        num_rows = rows.shape[0]
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        shape = (*before, self.outer * num_rows * self.inner, *after)
        if self.dim == 0 and self.outer == 1:
            return rows.reshape(shape)
        split = rows.reshape(num_rows, *before, self.outer, self.inner, *after)
        return split.movedim(0, self.dim + 1).reshape(shape).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Values from endpoint ``src`` to ``dst``; ``gradient`` lists those whose gradients come back."""

    src: int
    dst: int
    forward: tuple[Value, ...]
    gradient: tuple[Value, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """(src, dst)."""
        return (self.src, self.dst)
