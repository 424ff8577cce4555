"""The values of sizes for many numbers of rows at once.

In: sizes (ir/size.py): sympy expressions over one symbol, or formulas from a file. Out: float arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.size import Size
from rannc_backend.planner.cost.formula import Formula, is_a_float

if TYPE_CHECKING:
    import sympy


def evaluate(sizes: Sequence[Size], rows: Sequence[int]) -> NDArray[np.float64]:
    """The value of each size for each number of rows: shape [sizes, rows].

    All expressions are over the same one symbol (or none); equal ones are computed once.
    """
    points = np.asarray(rows, dtype=np.float64)
    numbers: dict[Size, int] = {}
    places = [numbers.setdefault(size, len(numbers)) for size in sizes]
    expressions = [size for size in numbers if not isinstance(size, Formula | int)]
    symbol = rows_symbol(expressions)
    known = np.empty((len(numbers), len(points)))
    polynomials: dict[int, tuple[float, ...]] = {}
    for size, place in numbers.items():
        if isinstance(size, Formula) and size.floats is not None:
            polynomials[place] = size.floats
        else:
            known[place] = (
                size.values(points) if isinstance(size, Formula) else _evaluate_one(size, symbol, points)
            )
    if polynomials:
        known[list(polynomials)] = _polynomial_values(list(polynomials.values()), points)
    return known[places] if places else known


def _polynomial_values(
    polynomials: Sequence[tuple[float, ...]], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[polynomials, points], from coefficients with the highest power first; rounded as `np.polyval`
    rounds.
    """
    length = max(map(len, polynomials))
    coefficients = np.array([(0.0,) * (length - len(item)) + item for item in polynomials])
    values = np.zeros((len(polynomials), len(points)))
    for power in range(length):
        values = values * points + coefficients[:, power, None]
    return values


def rows_symbol(expressions: Iterable[sympy.Expr]) -> sympy.Symbol | None:
    """The one free symbol of the expressions, None if they are all numbers."""
    symbols = set().union(*(expression.free_symbols for expression in expressions), set())
    assert len(symbols) <= 1, f"sizes depend on more than the batch size: {sorted(map(str, symbols))}"
    return next(iter(symbols), None)


def _evaluate_one(
    expression: sympy.Expr | int, symbol: sympy.Symbol | None, points: NDArray[np.float64]
) -> NDArray[np.float64]:
    if symbol is None or isinstance(expression, int) or expression.is_number:
        return np.full(len(points), float(expression))
    if expression.is_polynomial(symbol):
        # Nearly all sizes are a * rows + b; this is a hundred times faster than substituting.
        coefficients = expression.as_poly(symbol).all_coeffs()
        if all(
            not item.is_Rational or is_a_float(Fraction(int(item.p), int(item.q))) for item in coefficients
        ):
            values = np.polyval([float(item) for item in coefficients], points)
            return np.asarray(values, dtype=np.float64)
    return np.array([float(expression.subs(symbol, int(point))) for point in points])
