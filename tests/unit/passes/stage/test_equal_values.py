"""Equal values of a joint graph are computed once, and what might differ is not."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.graph_queries import argument_key
from rannc_backend.passes.stage.equal_values import share_equal_values

aten = torch.ops.aten
X = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).view(3, 4)


def _shared(function: Callable[..., Any], *values: Tensor) -> tuple[int, fx.GraphModule]:
    """How many calls are left out; what is left gives the same."""

    def flat(*given: Tensor) -> tuple[Any, ...]:
        result = function(*given)
        return result if isinstance(result, tuple) else (result,)

    graph_module = make_fx(flat, tracing_mode="fake")(*values)
    number = share_equal_values(graph_module.graph)
    graph_module.recompile()
    for found, expected in zip(graph_module(*values), flat(*values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return number, graph_module


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: x.sin() + x.sin(), 1),
        (lambda x: (x.sin().cos() + x.sin().cos()).exp(), 2),
        (lambda x: x.split(2, 1)[0] + x.split(2, 1)[0], 3),
        (lambda x: (x * 1).sum() + (x * 1.0).sum(), 0),
        (lambda x: torch.copysign(x, 0.0).sum() + torch.copysign(x, -0.0).sum(), 0),
        (lambda x: x.sum(0).sum() + x.sum(1).sum(), 0),
        (lambda x: x.to(torch.float32).sum() + x.to(torch.float16).sum(), 0),
    ],
)
def test_equal_calls_are_one(function: Callable[[Tensor], Tensor], number: int) -> None:
    assert _shared(function, X)[0] == number


def test_two_outputs_stay_two_tensors() -> None:
    number, graph_module = _shared(lambda x: (x.sin(), x.sin(), x.sin().view(12)), X)
    first, second, third = graph_module(X)
    assert number == 0 and len({value.untyped_storage()._cdata for value in (first, second, third)}) == 3


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    graph_module = make_fx(lambda x: (torch.rand_like(x) + torch.rand_like(x),), tracing_mode="fake")(X)
    assert share_equal_values(graph_module.graph) == 0


def test_what_changes_its_operand_or_is_of_a_library_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(target, (x, 1)) for target in (aten.add_.Tensor, _mystery) for _ in range(2)]
    size = [graph.call_function(operator.mul, (calls[0], 2)) for _ in range(2)]
    graph.output((*calls, *size))
    assert share_equal_values(graph) == 1


def _mystery(x: Any, number: int) -> Any:
    return x


def test_random_graphs_give_the_same_and_have_no_equal_calls_left() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        choices = [draw.randrange(1 << 30) for _ in range(24)]

        def function(x: Tensor, choices: list[int] = choices) -> Tensor:
            values = [x, x.clone()]
            for choice in choices:
                one, other = values[choice % len(values)], values[choice // 64 % len(values)]
                values.append((one.sin(), one + other, one * 2, one * 2.0, one.t().t())[choice % 5])
            return torch.stack(values).sum()

        _, graph_module = _shared(function, X)
        calls = [
            (node.target, str(node.args), str(node.kwargs))
            for node in graph_module.graph.nodes
            if node.op == "call_function"
        ]
        assert len(calls) == len(set(calls)), seed


@pytest.mark.parametrize("value", [slice(0, 2), [1, None], {"dim": 0}, 1.0, torch.float32, True])
def test_equal_arguments_have_equal_keys(value: Any) -> None:
    others = (slice(0, 3), (1, None), {"dim": 1}, 1, torch.float64, -1.0)
    assert argument_key(value) == argument_key(copy.deepcopy(value))
    assert all(argument_key(value) != argument_key(other) for other in others)


def test_what_cannot_be_compared_is_equal_to_nothing() -> None:
    value = object()
    assert argument_key(value) != argument_key(value)
