"""Operators by which a backward graph writes parameter gradients where they stay: into views of gradient
buckets.

In: a view of a bucket, and what the gradient is made of. Out: nothing; the view holds the sum over the
micro-batches so far. The operators are registered with torch.library, so they stay visible in graphs, and
Inductor keeps them as they are.

Terms. The *accumulate* says what a view holds before: nothing (FIRST) or a sum to add to (LATER). It is a
number of the graph, hence not 0 or 1, which torch takes for constants. The *listener* is told as soon as a
gradient has its last term; it is who reduces the bucket over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.triton_support import HAS_TRITON

FIRST, LATER = 2, 3
NARROW_DTYPES = frozenset({torch.bfloat16, torch.float16})


def sum_dtype(dtype: torch.dtype, *, wide: bool) -> torch.dtype:
    """The dtype in which gradients of a parameter are summed: its own, or with ``wide`` float32 for 16 bits."""
    return torch.float32 if wide and dtype in NARROW_DTYPES else dtype


class Listener(Protocol):
    """Who wants to know that gradients are complete."""

    def all_made(self, positions: Sequence[int]) -> None:
        """The gradients of parameters `positions` (whatever the graph's maker counts) have their last terms
        of this micro-batch.
        """

    def keep_rows(self, position: int, index: Tensor, rows: Tensor) -> None:
        """Rows ``rows[i]`` belong to row ``index[i]`` of the gradient of a table. Both are the listener's."""


# Graphs hold tensors and numbers only, so who listens is known by who calls: set for the time of one call, by
# `listening`.
_LISTENER: ContextVar[Listener | None] = ContextVar("gradient listener", default=None)
_TABLES: ContextVar[GradientTables | None] = ContextVar("gradient tables", default=None)

_LIBRARY = torch.library.Library("rannc", "FRAGMENT")
_LIBRARY.define(
    "write_product_(Tensor(a!) bucket, int[] size, int[] stride, Tensor left, Tensor right, SymInt "
    "accumulate) -> ()",
    tags=(torch.Tag.flexible_layout,),  # products read either order
)
_LIBRARY.define(
    "write_rows_(Tensor(a!) bucket, Tensor index, Tensor rows, int padding_index, SymInt accumulate) -> ()"
)
_LIBRARY.define(
    "keep_rows_(Tensor(a!) bucket, Tensor index, Tensor rows, Tensor? mask, int padding_index, int position) -> ()"
)
_LIBRARY.define("write_gradients_(Tensor(a!)[] buckets, Tensor[] gradients, SymInt accumulate) -> ()")
_LIBRARY.define("gradients_made_(Tensor(a!)[] buckets, int[] positions) -> ()")


@contextlib.contextmanager
def listening(listener: Listener, tables: GradientTables | None = None) -> Iterator[None]:
    """Tell `listener` of gradients that graphs called in this context complete; `tables`: those of the stage
    whose graphs they are.
    """
    token, tables_token = _LISTENER.set(listener), _TABLES.set(tables)
    try:
        yield
    finally:
        _LISTENER.reset(token)
        _TABLES.reset(tables_token)


def write_product(
    bucket: Tensor, size: Sequence[int], stride: Sequence[int], left: Tensor, right: Tensor, accumulate: int
) -> None:
    """bucket (+)= left @ right, by the matrix product itself: nothing is written beside the bucket.

    Args:
        bucket: a gradient; `size` and `stride` are how its memory looks as the product, [m, n] or [batch, m,
        n]. left, right: [m, k] and [k, n], or with a batch dimension in front.
        accumulate: FIRST or LATER.
    """
    out = bucket.as_strided(size, stride)
    if accumulate == FIRST:
        (torch.mm if len(size) == 2 else torch.bmm)(left, right, out=out)
    elif len(size) == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


def write_rows(bucket: Tensor, index: Tensor, rows: Tensor, padding_index: int, accumulate: int) -> None:
    """bucket[index[i]] += rows[i], over all i, as the gradient of an embedding table; only rows that occur
    are touched after FIRST.

    Args:
        bucket: [rows of the table, *features].
        index: integers of any shape; those equal to `padding_index` are left out.
        rows: [*index.shape, *features].
        accumulate: FIRST or LATER.
    """
    if accumulate == FIRST:
        bucket.zero_()
    if padding_index >= 0:
        padding = (index == padding_index).reshape(*index.shape, *[1] * (rows.dim() - index.dim()))
        rows = rows.masked_fill(padding, 0)
    bucket.index_add_(0, index.reshape(-1), rows.reshape(-1, *bucket.shape[1:]))


def keep_rows(
    bucket: Tensor, index: Tensor, rows: Tensor, mask: Tensor | None, padding_index: int, position: int
) -> None:
    """Give the listener a copy of the rows of a sparse gradient, without those of the padding; for CPUs, as their
    number depends on values.

    Args:
        bucket: named so that `gradients_made_` comes after this.
        index: integers of any shape. rows: [*index.shape, *features].
        mask: which of them count, in the shape of the index, or with dimensions of one element behind it; None: all but
            those equal to `padding_index`.
    """
    del bucket
    listener = _LISTENER.get()
    if listener is None:
        return
    numbers = index.reshape(-1)
    counts = numbers != padding_index if mask is None else mask.reshape(-1)
    listener.keep_rows(position, numbers[counts], rows.reshape(numbers.numel(), -1)[counts])


def can_launch(tensor: Tensor) -> bool:
    """Whether a kernel can be started where ``tensor`` is."""
    return HAS_TRITON and tensor.is_cuda


def write_gradients(buckets: Sequence[Tensor], gradients: Sequence[Tensor], accumulate: int) -> None:
    """buckets[i] (+)= gradients[i], cast where the dtypes differ; on a GPU one launch for those of a
    dtype.
    """
    if len(buckets) > 1 and can_launch(buckets[0]):
        tables = _TABLES.get() or GradientTables()
        if tables.write(buckets, gradients, accumulate=accumulate == LATER) is not None:
            return
    for bucket, gradient in zip(buckets, gradients, strict=True):
        if accumulate == FIRST:
            bucket.copy_(gradient)
        else:
            bucket.add_(gradient)


def gradients_made(buckets: Sequence[Tensor], positions: Sequence[int]) -> None:
    """Tell the listener; `buckets` are named so that this comes after all that writes them."""
    del buckets
    listener = _LISTENER.get()
    if listener is not None:
        listener.all_made(positions)


for _name, _function in (
    ("write_product_", write_product),
    ("write_rows_", write_rows),
    ("keep_rows_", keep_rows),
    ("write_gradients_", write_gradients),
    ("gradients_made_", gradients_made),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rannc::{_name}", lambda *arguments: None, lib=_LIBRARY)
