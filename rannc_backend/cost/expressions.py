"""Sizes of graph values as sympy expressions in the number of rows, and their evaluation for many numbers of rows at once.

In: fake tensors from `node.meta["val"]`, whose batch sizes are SymInts over one symbol. Out: sympy expressions, or float
arrays once the rows are given. Terms: *rows* is the number of samples that one replica computes in one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import sympy
import torch
from numpy.typing import NDArray


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
    """Bytes of a tensor or of all tensors in a tuple or list; 0 for anything else (None, numbers, SymInts)."""
    if isinstance(value, torch.Tensor):
        return _product((*shape_of(value), sympy.Integer(value.element_size())))
    if isinstance(value, list | tuple):
        return sympy.Add(*(value_bytes(item) for item in value))
    return sympy.Integer(0)


@functools.lru_cache(maxsize=4096)
def _product(factors: tuple[sympy.Expr, ...]) -> sympy.Expr:
    # A graph has thousands of values and a few dozen shapes.
    return sympy.Mul(*factors)


def evaluate(expressions: Sequence[sympy.Expr], rows: Sequence[int]) -> NDArray[np.float64]:
    """The value of each expression for each number of rows: shape [expressions, rows].

    All expressions are over the same one symbol (or none); equal expressions are computed once.
    """
    symbol = rows_symbol(dict.fromkeys(expressions))
    points = np.asarray(rows, dtype=np.float64)
    known: dict[sympy.Expr, NDArray[np.float64]] = {}
    result = np.empty((len(expressions), len(points)))
    for index, expression in enumerate(expressions):
        if expression not in known:
            known[expression] = _evaluate_one(expression, symbol, points)
        result[index] = known[expression]
    return result


def rows_symbol(expressions: Iterable[sympy.Expr]) -> sympy.Symbol | None:
    """The one free symbol of the expressions, None if they are all numbers."""
    symbols = set().union(*(expression.free_symbols for expression in expressions), set())
    assert len(symbols) <= 1, f"sizes depend on more than the batch size: {sorted(map(str, symbols))}"
    return next(iter(symbols), None)


def _evaluate_one(expression: sympy.Expr, symbol: sympy.Symbol | None, points: NDArray[np.float64]) -> NDArray[np.float64]:
    if symbol is None or expression.is_number:
        return np.full(len(points), float(expression))
    if expression.is_polynomial(symbol):
        # Nearly all sizes are a * rows + b; this is a hundred times faster than substituting.
        coefficients = [float(coefficient) for coefficient in sympy.Poly(expression, symbol).all_coeffs()]
        return np.polyval(coefficients, points)
    return np.array([float(expression.subs(symbol, int(point))) for point in points])
