"""Sizes over lengths as numbers, as expressions and as nodes: the same value whichever way it is asked for. Floats as
tensors: the values and types that a number gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.passes.pipeline import run_pass, with_facts
from rannc_backend.passes.plain_numbers import new_number, new_size, plain_mode
from rannc_backend.passes.size_nodes import FloatsAsTensors, exact_quotient, number_of, plain_at, size_node

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
    assert exact_quotient((LENGTH**2 + 3 * LENGTH + 2), LENGTH + 1) == LENGTH + 2
    assert exact_quotient(LENGTH, 2) is None and exact_quotient(LENGTH + 1, LENGTH) is None


# --- Python's floats


def _traced(function: Callable[..., Any], *tensors: torch.Tensor) -> tuple[fx.GraphModule, bool]:
    """A graph of tensors and of the float 0.3 as a tensor; whether a float is needed as a number."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    assert mode.shape_env is not None
    number = new_number(mode.shape_env, "number", 0.3)
    fakes = [
        mode.from_tensor(tensor, static_shapes=True)
        for tensor in (*tensors, torch.tensor(0.3, dtype=torch.float64))
    ]
    with mode:
        made = make_fx(lambda number, *tensors: function(*tensors[:-1], number))(number, *fakes)
    first, *_, last = made.graph.find_nodes(op="placeholder")
    result = run_pass(FloatsAsTensors({first.name: last.name}), with_facts(made, FloatsAsTensors.requires))
    assert result.graph_module is made and result.needed in (frozenset(), {first.name})
    return made, bool(result.needed)


#: In arithmetic and operators, with tensors and scalars of several types.
AS_TENSORS: dict[str, Callable[..., torch.Tensor]] = {
    "product": lambda x, b: x * b,
    "scalar": lambda x, b: x.sum() * b + b,
    "arithmetic": lambda x, b: x * (2 * (1 - b) / (b**2 + 3) - abs(-b)),
    "functions": lambda x, b: x * torch.sym_max(b, 0.4) + torch.sym_sqrt(b),
    "remainder": lambda x, b: x * (-b % 0.07),
    "power": lambda x, b: x.abs() ** b + b**x,
    "bounds": lambda x, b: x.clamp(0.1, b) + x.clamp(max=b),
    "alpha": lambda x, b: torch.add(x, x, alpha=b) - torch.sub(x, x.square(), alpha=b),
    "fill": lambda x, b: x + torch.full((2, 1), b, dtype=x.dtype) + torch.full_like(x, b),
    "choice": lambda x, b: torch.where(x > b, x, b),
    "lerp": lambda x, b: torch.lerp(x, x.square(), b),
}
NEEDED: dict[str, Callable[..., torch.Tensor]] = {
    "size": lambda x, b: x[:, : torch.sym_int(b * 10)],
    "integer": lambda x, b: x * torch.sym_int(b * 10),
    "operator": lambda x, b: torch.nn.functional.leaky_relu(x, b),
    "integers": lambda x, b: torch.full((2,), b, dtype=torch.int64) + x[:2].sum(),
}


@pytest.mark.parametrize("name", AS_TENSORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_float_is_a_tensor_and_results_keep_their_types(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    made, needed = _traced(AS_TENSORS[name], x)
    # Of two single elements the narrow type would lose.
    assert needed == (name == "scalar" and dtype is torch.bfloat16)
    if needed:
        return
    assert not any(isinstance(node.meta.get("val"), torch.SymFloat) for node in made.graph.nodes)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for value in (0.3, 0.7):
        expected = AS_TENSORS[name](x, value)
        found = made(x, torch.tensor(value, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_float_beside_integers_has_the_default_type() -> None:
    x = torch.arange(6).reshape(2, 3)
    made, needed = _traced(lambda x, b: (x * b, x > b, x.sum() * b), x)
    assert not needed
    for value in (0.3, 1.7):
        found = made(x, torch.tensor(value, dtype=torch.float64))
        torch.testing.assert_close(found, (x * value, x > value, x.sum() * value), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NEEDED)
def test_what_needs_the_number_itself_is_told(name: str) -> None:
    assert _traced(NEEDED[name], torch.linspace(-1, 1, 6).reshape(2, 3))[1]
