"""Sizes over the number of rows as text, and back; reading evaluates no code.

In: sympy expressions over at most one symbol. Out: text such as "1024*rows + 2368", and from such text the same values.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy

ROWS = sympy.Symbol("rows", integer=True, positive=True)
_MOST_CHARACTERS = 20_000
_LARGEST_EXPONENT = 8

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
}
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
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def expression_text(expression: sympy.Expr) -> str:
    """The text of an expression; its one symbol is written as "rows". ValueError: it cannot be read back."""
    symbols = expression.free_symbols
    if len(symbols) > 1:
        raise ValueError(f"{expression} is over {len(symbols)} symbols, not over the number of rows alone")
    text = str(_in_sympys_words(expression.xreplace(dict.fromkeys(symbols, ROWS))))
    if expression_from_text(text).xreplace({ROWS: sympy.Integer(7)}) != expression.xreplace(dict.fromkeys(symbols, sympy.Integer(7))):
        raise ValueError(f"{text} is read back as another expression")
    return text


def expression_from_text(text: str) -> sympy.Expr:
    """The expression over `ROWS`. ValueError: not such a text."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(text)} characters")
    try:
        result = sympy.sympify(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, TypeError, RecursionError, ZeroDivisionError, MemoryError):
        raise ValueError(f"{text[:60]!r} is no expression over rows") from None
    if not isinstance(result, sympy.Expr) or result.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo):
        raise ValueError(f"{text[:60]!r} is no size")
    return result


def _in_sympys_words(expression: sympy.Basic) -> sympy.Basic:
    if not expression.args:
        return expression
    arguments = [_in_sympys_words(argument) for argument in expression.args]
    return _OF_TORCH.get(type(expression).__name__, expression.func)(*arguments)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Float(node.value)
    if isinstance(node, ast.Name) and node.id == ROWS.name:
        return ROWS
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = _value(node.right)
        # 9**9**9 would take the machine down.
        if not (exponent.is_Integer and abs(exponent) <= _LARGEST_EXPONENT):
            raise ValueError(f"exponent {exponent} in an expression")
        return _value(node.left) ** exponent
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is no part of an expression over rows")
