"""Sizes of graph values as sympy expressions in the number of rows.

In: fake tensors from `node.meta["val"]`, whose batch sizes are SymInts over one symbol. Out: sympy
expressions.
"""

from __future__ import annotations

import functools

import sympy
import torch


def as_expression(size: object) -> sympy.Expr:
    """An int or SymInt as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return sympy.sympify(size.node.expr)
    assert isinstance(size, int), f"not a size: {size!r}"
    return sympy.Integer(size)


def shape_of(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    return tuple(as_expression(size) for size in value.shape)


def numel(value: torch.Tensor) -> sympy.Expr:
    return _product(shape_of(value))


def value_bytes(value: object) -> sympy.Expr:
    """Bytes of a tensor or of all tensors in a tuple or list; 0 for anything else (None, numbers,
    SymInts).
    """
    if isinstance(value, torch.Tensor):
        return _product((*shape_of(value), sympy.Integer(value.element_size())))
    if isinstance(value, list | tuple):
        return sympy.Add(*(value_bytes(item) for item in value))
    return sympy.Integer(0)


def counted_bytes(value: object, least_elements: int) -> sympy.Expr:
    """As `value_bytes`; 0 for what has fewer elements, in one row where it has rows."""
    size = value_bytes(value)
    if not least_elements or not isinstance(value, torch.Tensor):
        return size
    return size if is_counted(size, value.element_size(), least_elements) else sympy.Integer(0)


def is_counted(size: sympy.Expr, element_size: int, least_elements: int) -> bool:
    """Whether so many bytes are of so many elements at least, of one row where they are over rows."""
    one_row = size.subs(dict.fromkeys(size.free_symbols, 1))
    return int(one_row) >= least_elements * element_size


@functools.lru_cache(maxsize=4096)
def _product(factors: tuple[sympy.Expr, ...]) -> sympy.Expr:
    # A graph has thousands of values and a few dozen shapes.
    return sympy.Mul(*factors)
