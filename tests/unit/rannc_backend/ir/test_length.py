"""Sizes over lengths become the numbers of a call, and only those that a call may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.length import LengthDims, length_symbol

FIRST, SECOND = length_symbol(0), length_symbol(1)
DIMS = LengthDims(hints=(53, 59), sizes={(0, 1): FIRST, (1, 1): FIRST + 1, (1, 2): SECOND})


def _call(sizes: dict[tuple[int, int], int]) -> tuple[int, ...] | None:
    return DIMS.lengths_of(lambda position, dim: sizes[position, dim])


@given(st.integers(2, 99), st.integers(2, 99))
def test_lengths_are_read_where_they_are(first: int, second: int) -> None:
    assert DIMS.carrier_of(0) == (0, 1) and DIMS.carrier_of(1) == (1, 2)
    assert _call({(0, 1): first, (1, 1): first + 1, (1, 2): second}) == (first, second)
    assert _call({(0, 1): first, (1, 1): first + 2, (1, 2): second}) is None


def test_sizes_below_two_are_no_lengths() -> None:
    assert _call({(0, 1): 1, (1, 1): 2, (1, 2): 5}) is None
    assert _call({(0, 1): 4, (1, 1): 5, (1, 2): 0}) is None
