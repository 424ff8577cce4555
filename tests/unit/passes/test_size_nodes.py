"""Sizes over lengths as numbers, as expressions and as nodes: the same value whichever way it is asked for."""

from __future__ import annotations

import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from rannc_backend.passes.plain_numbers import new_size, plain_mode
from rannc_backend.passes.size_nodes import exact_quotient, number_of, plain_at, size_node

ROWS, LENGTH = sympy.symbols("rows length", integer=True, positive=True)


def test_numbers_in_place_of_lengths() -> None:
    known = {LENGTH: sympy.Integer(4)}
    assert plain_at(7, known) == 7
    assert plain_at(2 * LENGTH + 1, known) == 9
    assert plain_at(ROWS * LENGTH, known) == 4 * ROWS


@given(st.integers(2, 40), st.integers(2, 40))
def test_a_node_is_what_its_expression_is(rows: int, length: int) -> None:
    environment = plain_mode().shape_env
    assert environment is not None
    graph, sizes = fx.Graph(), {}
    for name, hint in (("rows", rows), ("length", length)):
        node = graph.placeholder(name)
        node.meta["val"] = new_size(environment, name, hint)
        sizes[node.meta["val"].node.expr] = node
    first, second = sizes
    for expression in (first * second + 3, (first + 1) ** 2, 2 * second):
        made = size_node(graph, expression, sizes)
        assert isinstance(made, fx.Node) and made.meta["val"].node.hint == number_of(
            expression, [first, second], [rows, length]
        )
    assert size_node(graph, ROWS, sizes) is None, "a symbol that no node has"


def test_quotients_are_whole_for_all_lengths() -> None:
    assert exact_quotient(12, 4) == 3 and exact_quotient(12, 5) is None and exact_quotient(12, 0) is None
    assert exact_quotient(LENGTH, 0) is None
    assert exact_quotient(6 * LENGTH, 2 * LENGTH) == 3 and exact_quotient(6 * LENGTH, 3) == 2 * LENGTH
    assert exact_quotient(LENGTH, 2) is None and exact_quotient(LENGTH + 1, LENGTH) is None
