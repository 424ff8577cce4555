"""Sizes over the number of rows as text, for files.

In: sympy expressions over at most one symbol. Out: text such as "1024*rows + 2368", which `formula.Formula`
reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from rannc_backend.planner.cost.formula import ROWS_NAME, Formula

ROWS = sympy.Symbol(ROWS_NAME, integer=True, positive=True)
_PROBE = 7
#: What torch has functions of its own for, in sympy's.
_OF_TORCH: Mapping[str, Callable[..., Any]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "FloorDiv": lambda number, divisor: sympy.floor(number / divisor),
    "CleanDiv": operator.truediv,
    "FloorToInt": sympy.floor,
    "CeilToInt": sympy.ceiling,
}


def expression_text(expression: sympy.Expr) -> str:
    """The text of an expression; its one symbol is written as "rows". ValueError: it cannot be read back."""
    symbols = expression.free_symbols
    if len(symbols) > 1:
        raise ValueError(f"{expression} is over {len(symbols)} symbols, not over the number of rows alone")
    text = str(_in_sympys_words(expression.xreplace(dict.fromkeys(symbols, ROWS))))
    if float(Formula.of_text(text).at(_PROBE)) != float(
        expression.xreplace(dict.fromkeys(symbols, sympy.Integer(_PROBE)))
    ):
        raise ValueError(f"{text} is read back as another expression")
    return text


def _in_sympys_words(expression: sympy.Basic) -> sympy.Basic:
    if not expression.args:
        return expression
    arguments = [_in_sympys_words(argument) for argument in expression.args]
    return _OF_TORCH.get(type(expression).__name__, expression.func)(*arguments)
