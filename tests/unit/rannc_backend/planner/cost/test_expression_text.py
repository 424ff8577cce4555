"""Sizes survive being written and read; what is not a size is refused and never run."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilToInt, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from rannc_backend.planner.cost.expression_text import expression_text
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.formula import Formula

S = sympy.Symbol("s30", integer=True, positive=True)


@st.composite
def sizes(draw):
    def pair(children):
        two = st.tuples(children, children)
        number = st.integers(1, 64).map(sympy.Integer)
        return st.one_of(
            two.map(lambda p: p[0] + p[1]),
            two.map(lambda p: p[0] * p[1]),
            two.map(lambda p: Max(*p)),
            two.map(lambda p: Min(*p)),
            st.tuples(children, number).map(lambda p: FloorDiv(*p)),
            st.tuples(children, number).map(lambda p: Mod(*p)),
            st.tuples(children, number).map(lambda p: PythonMod(*p)),
        )

    whole = draw(
        st.recursive(st.one_of(st.just(S), st.integers(0, 4096).map(sympy.Integer)), pair, max_leaves=6)
    )
    return whole / draw(st.integers(1, 4))


@settings(deadline=None, max_examples=200)
@given(sizes(), st.integers(2, 100))
def test_an_expression_has_the_same_values_after_writing_and_reading(expression, rows):
    again = Formula.of_text(expression_text(expression))
    exact = expression.xreplace({S: sympy.Integer(rows)})
    assert again.at(rows) == Fraction(int(exact.p), int(exact.q))
    assert again.coefficients is not None or not expression.is_polynomial(S)
    # A plan from a file is that of the model to the last bit.
    assert (evaluate([again], [1, rows]) == evaluate([expression], [1, rows])).all()


def test_thirds_are_rounded_once():
    # torch's maximum stays one, sympy's is the second operand.
    expression = Max(S, S + 1) / 3
    again = Formula.of_text(expression_text(expression))
    for size in (again, expression, (S + 1) / 3):
        assert evaluate([size], [1, 4, 7]).tolist() == [[2 / 3, 5 / 3, 8 / 3]]


def test_the_functions_of_torch():
    assert expression_text(32 * FloorDiv(S + 31, 32)) == "32*floor(rows/32 + 31/32)"
    assert Formula.of_text(expression_text(CleanDiv(S * 4, 2))).coefficients == (2, 0)
    assert Formula.of_text(expression_text(CeilToInt(S / 3))).at(7) == 3


def test_what_is_divided_by_nothing_is_infinite():
    assert evaluate([Formula.of_text("6/(rows - 3)")], [1, 3]).tolist() == [[-3.0, float("inf")]]


def test_two_symbols_are_not_written():
    with pytest.raises(ValueError, match="2 symbols"):
        expression_text(S + sympy.Symbol("u0"))


@pytest.mark.parametrize(
    "text",
    ["", "rows +", "other", "__import__('os').system('true')", "rows.real", "[rows]", "'7'", "True", "open(rows)", "9**9**9",
     "rows**rows", "Max(a=1)", "1/0", "Max", "lambda: 1", "(" * 500 + ")" * 500, "1+" * 10_000 + "1", "1j", "floor()", "rows//2",
     "(" * 9 + "9" + "**8)" * 9, "(" * 9 + "rows" + "**8)" * 9, "Mod(rows, 0)", "7/(rows - rows)", "rows**(1/2)", "1e999"],
)  # fmt: skip
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        Formula.of_text(text)
