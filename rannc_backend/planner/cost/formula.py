"""Sizes over the number of rows, read from text and evaluated exactly: without sympy, whose import alone
takes longer than a search.

In: text such as "1024*rows + 2368", as planner/cost/expression_text.py writes it. Out: a `Formula`. No code
is evaluated, and no text makes numbers that fill the machine.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_NAME = "rows"
_MAX_CHARACTERS = 20_000
_LARGEST_EXPONENT = 8
_LARGEST_DEGREE = 16
_MAX_BITS = 2048


class _NotPolynomial(Exception):
    """Only numbers can be put in for the rows."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A size over the rows. `coefficients`: of a polynomial, the highest power first; None where it is
    something else.
    """

    text: str
    coefficients: tuple[Fraction, ...] | None
    floats: tuple[float, ...] | None = field(init=False, compare=False)
    """The coefficients where floats can be all of them, so that values are rounded once."""

    def __post_init__(self) -> None:
        exact = self.coefficients is not None and all(map(is_a_float, self.coefficients))
        object.__setattr__(self, "floats", tuple(map(float, self.coefficients or ())) if exact else None)

    def __hash__(self) -> int:
        return hash(self.text)  # hashing fractions takes longer than evaluating them

    @classmethod
    def of_text(cls, text: str) -> Formula:
        """Read a text. ValueError: it is none of a size."""
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"an expression of {len(text)} characters")
        try:
            try:
                value = _value(ast.parse(text, mode="eval").body, _Polynomial((Fraction(0), Fraction(1))))
                return cls(text, tuple(reversed(_polynomial(value).ascending)))
            except _NotPolynomial:
                found = cls(text, None)
                found.at(1)
                return found
        except (SyntaxError, TypeError, RecursionError, ZeroDivisionError, OverflowError, MemoryError):
            raise ValueError(f"{text[:60]!r} is no expression over rows") from None

    def at(self, rows: int) -> Fraction:
        """The exact value."""
        if self.coefficients is None:
            return Fraction(_value(ast.parse(self.text, mode="eval").body, Fraction(rows)))
        return functools.reduce(
            lambda value, coefficient: value * rows + coefficient, self.coefficients, Fraction(0)
        )

    def values(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The value for each number of rows, rounded once; inf where it is divided by nothing."""
        if self.floats is not None:
            return np.asarray(np.polyval(self.floats, rows), dtype=np.float64)
        return np.array([_or_infinity(functools.partial(self.at, int(count))) for count in rows])


def is_a_float(number: Fraction) -> bool:
    """Whether a float can be this number, so that sums and products with numbers of rows are not rounded on
    the way.
    """
    return number.denominator & (number.denominator - 1) == 0 and abs(number.numerator) < 2**53


def _or_infinity(value: Callable[[], Fraction]) -> float:
    try:
        return float(value())
    except ZeroDivisionError:
        return float("inf")


@dataclass(frozen=True, slots=True)
class _Polynomial:
    """Over the rows; coefficients from that of power 0 on, the last one not 0 unless it is the only one."""

    ascending: tuple[Fraction, ...]

    def constant(self) -> Fraction:
        if len(self.ascending) > 1:
            raise _NotPolynomial
        return self.ascending[0]

    def plus(self, other: _Polynomial, sign: int) -> _Polynomial:
        size = max(len(self.ascending), len(other.ascending))
        return _trimmed([a + sign * b for a, b in zip(self._padded(size), other._padded(size), strict=True)])

    def times(self, other: _Polynomial) -> _Polynomial:
        product = [Fraction(0)] * (len(self.ascending) + len(other.ascending) - 1)
        for i, a in enumerate(self.ascending):
            for j, b in enumerate(other.ascending):
                product[i + j] += a * b
        return _trimmed(product)

    def _padded(self, size: int) -> Iterator[Fraction]:
        yield from self.ascending
        yield from [Fraction(0)] * (size - len(self.ascending))


def _trimmed(coefficients: list[Fraction]) -> _Polynomial:
    while len(coefficients) > 1 and not coefficients[-1]:
        coefficients.pop()
    if len(coefficients) > _LARGEST_DEGREE + 1:
        raise OverflowError
    for coefficient in coefficients:
        _small(coefficient)
    return _Polynomial(tuple(coefficients))


def _small(number: Fraction) -> Fraction:
    # Products of products would take the machine down.
    if number.numerator.bit_length() > _MAX_BITS or number.denominator.bit_length() > _MAX_BITS:
        raise OverflowError
    return number


_Value = Fraction | _Polynomial


def _polynomial(value: _Value) -> _Polynomial:
    return value if isinstance(value, _Polynomial) else _Polynomial((value,))


def _add(left: _Value, right: _Value, sign: int = 1) -> _Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _small(left + sign * right)
    return _polynomial(left).plus(_polynomial(right), sign)


def _multiply(left: _Value, right: _Value) -> _Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _small(left * right)
    return _polynomial(left).times(_polynomial(right))


def _divide(left: _Value, right: _Value) -> _Value:
    return _multiply(left, 1 / (right if isinstance(right, Fraction) else right.constant()))


def _power(base: _Value, exponent: _Value) -> _Value:
    number = exponent if isinstance(exponent, Fraction) else exponent.constant()
    if number.denominator != 1 or abs(number) > _LARGEST_EXPONENT:
        raise ValueError(f"exponent {number} in an expression")
    result: _Value = Fraction(1)
    for _ in range(abs(int(number))):
        result = _multiply(result, base)
    return result if number >= 0 else _divide(Fraction(1), result)


def _floor(number: Fraction) -> Fraction:
    return Fraction(number.numerator // number.denominator)


def _mod(number: Fraction, divisor: Fraction) -> Fraction:
    return number - divisor * _floor(number / divisor)


_FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {
    "Max": lambda *numbers: max(numbers),
    "Min": lambda *numbers: min(numbers),
    "Mod": _mod,
    "floor": _floor,
    "ceiling": lambda number: -_floor(-number),
}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: functools.partial(_add, sign=-1),
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.Pow: _power,
}


def _value(node: ast.expr, rows: _Value) -> Any:
    """The value of a text's tree with `rows` put in. Raises _NotPolynomial where only a number can be."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name) and node.id == ROWS_NAME:
        return rows
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _multiply(Fraction(-1), _value(node.operand, rows))
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Pow)
        and any(isinstance(part, ast.Name) for part in ast.walk(node.right))
    ):
        raise ValueError("rows in an exponent")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, rows), _value(node.right, rows))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        arguments = [_value(argument, rows) for argument in node.args]
        numbers = [item if isinstance(item, Fraction) else item.constant() for item in arguments]
        return _FUNCTIONS[node.func.id](*numbers)
    raise ValueError(f"{ast.unparse(node)[:60]!r} is no part of an expression over rows")
