"""Where the rows of the batch are in a value.

In: nothing (data types only). Out: one layout per value, made by batch_axis and read by everyone after it.

Terms: `rows` is the number of samples of the batch; a slice is an interval of rows; the global batch is all
rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

from rannc_backend.passes.size_nodes import Size


@dataclass(frozen=True, slots=True)
class Constant:
    """The same for every row: parameters, buffers, replicated inputs and what is computed from them alone."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Row r of the value depends on row r of the batch alone.

    Dimension `dim` has outer * rows * inner elements, indexed (outer, row, inner), and is the only one that
    holds rows. Both may depend on lengths.
    `uniform`: every element along `dim` is the same, so that another split of the same size into outer and
    inner is as true.
    """

    dim: int
    outer: Size = 1
    inner: Size = 1
    uniform: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Laid out as Rows(dim, 1, inner * each) and every element is its own place along `dim`, divided by `each`
    and rounded down (`arange(rows)`, `arange(rows * inner)`, and views of them).

    May only be used to index the batch dimension of a Rows value: the number itself differs between slices.
    """

    dim: int
    inner: Size = 1
    each: Size = 1


@dataclass(frozen=True, slots=True)
class RowCount:
    """A SymInt or SymFloat computed from the number of rows of the slice; used in shapes only, recomputed
    where needed.
    """


@dataclass(frozen=True, slots=True)
class PartialSum:
    """A sum over the rows of a slice: the global value is the sum over all slices.

    `input_only`: depends on no parameter, buffer, random number or differentiated input, so it can be had
    before the step.
    """

    input_only: bool = False


@dataclass(frozen=True, slots=True)
class Reduced:
    """Computed from global sums (or from the global number of rows).

    With `input_only` it is known before the step and may be used by row-wise operators as a constant is.
    """

    input_only: bool = False


@dataclass(frozen=True, slots=True)
class SliceStatistic:
    """Belongs to one slice, by stated rule: batch statistics of BatchNorm in training. May only become a
    buffer.
    """


@dataclass(frozen=True, slots=True)
class Whole:
    """Computed from rows that meet, and not one value per row: true of the whole batch alone (see
    `batch_axis.analyze_batch_axis`, `together`).
    """


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The elements that an index has sorted or chosen: along the one dimension of `keys`, outer * rows * inner
    of them. Two are equal if one index has made both.

    `rising`: the index sorts `keys` from small to large.
    """

    keys: fx.Node
    outer: Size
    inner: Size
    rising: bool


@dataclass(frozen=True, slots=True)
class Choice(Origin):
    """The elements at which a mask, `keys`, is true: of one row `inner` on the average, a size of their own. Two are
    equal if that size is.
    """

    keys: fx.Node = field(compare=False)
    outer: Size
    inner: Size
    rising: bool


@dataclass(frozen=True, slots=True)
class Ordered:
    """Dimension `dim` holds the elements of `origin` in the order of its index, `each` places for every element, and
    each computed from that element alone. `is_key`: they are its keys.
    """

    dim: int
    origin: Origin
    each: Size = 1
    is_key: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class OrderIndex:
    """The index itself: the place at which each element of Ordered(dim, origin) stands along the dimension of
    `origin`, divided by `divisor` and rounded down.
    """

    dim: int
    origin: Origin
    divisor: Size = 1


@dataclass(frozen=True, slots=True)
class InverseIndex:
    """Laid out as the elements of `origin`, and each is its own place in the order: what ends it."""

    dim: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class KeyCounts(PartialSum):
    """[keys]: how many elements of a slice have each of the keys 0, 1, ... of `keys`."""

    keys: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class SegmentEnds:
    """[keys]: where, in the rising order of `keys`, the elements of a slice with each of the keys end."""

    keys: fx.Node


@dataclass(frozen=True, slots=True)
class Several:
    """Layouts of the elements of a tuple or list value."""

    elements: tuple[Layout, ...]


def width_of(layout: Rows | RowIndex | Ordered | OrderIndex | InverseIndex) -> Size:
    """How many elements the dimension of rows has for each row."""
    if isinstance(layout, Rows):
        return layout.outer * layout.inner
    if isinstance(layout, RowIndex):
        return layout.inner * layout.each
    return layout.origin.outer * layout.origin.inner * (layout.each if isinstance(layout, Ordered) else 1)


Layout: TypeAlias = (
    "Constant | Rows | RowIndex | RowCount | PartialSum | Reduced | SliceStatistic | Whole | Several | Ordered | "
    "OrderIndex | InverseIndex | SegmentEnds"
)
