"""Sizes of the user's tensors that differ between calls, beside the batch size: lengths of sequences, sizes of
images.

In: nothing. Out: frozen descriptions, made by the capture and used wherever a shape becomes numbers.

Terms. A *length* is one such size. It is the same on all ranks and for all micro-batches of a step, and two or
more: sizes of 0 and 1 mean something else to operators. A captured graph has a placeholder for each of its
lengths, which holds a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy

#: The smallest size that a length may have.
SMALLEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """One length of a captured graph: dimension ``dim`` of the input ``carrier`` has that size."""

    name: str  # of its placeholder
    symbol: sympy.Symbol
    hint: int  # at the call that was captured
    carrier: str
    dim: int
    longest: int = 0  # that the user has said it will have; 0: unknown

    def planned(self, size: int) -> int:
        """The length that memory is planned for, in a job that begins with this one."""
        return max(size, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDims:
    """Dimensions of inputs whose sizes are to be expressions of lengths in a capture.

    Attributes:
        hints: the size that stands for each length where the capture has to decide something.
        sizes: by position of an input and dimension, an expression of `length_symbol(0)`, `length_symbol(1)`...
    """

    hints: tuple[int, ...] = ()
    sizes: Mapping[tuple[int, int], sympy.Expr] = field(default_factory=dict)

    def carrier_of(self, index: int) -> tuple[int, int]:
        """The first input and dimension whose size is this length itself."""
        symbol = length_symbol(index)
        return min(place for place, size in self.sizes.items() if size == symbol)

    def lengths_of(self, size_at: Callable[[int, int], int]) -> tuple[int, ...] | None:
        """The lengths of a call whose inputs have the sizes `size_at(position, dim)`; None where those are not
        these expressions of lengths.
        """
        lengths = tuple(size_at(*self.carrier_of(index)) for index in range(len(self.hints)))
        known = {length_symbol(index): sympy.Integer(size) for index, size in enumerate(lengths)}
        fits = all(size_at(*place) == size.xreplace(known) for place, size in self.sizes.items())
        return lengths if fits and all(size >= SMALLEST for size in lengths) else None


NO_LENGTHS = LengthDims()


def length_name(index: int) -> str:
    """Of the placeholder of a graph's length."""
    return f"length_{index}"


def length_symbol(index: int) -> sympy.Symbol:
    """Stands for a length before a capture has a symbol for it."""
    return sympy.Symbol(length_name(index), integer=True, positive=True)
