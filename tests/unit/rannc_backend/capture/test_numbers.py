"""Python's floats that change between calls: which are inputs of the graph, and which it is compiled for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.capture.dynamo import SeenNumbers
from tests.default_dtype import float64
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo

VALUES = (0.1, 0.2, 0.3, 0.1, 0.4)


@pytest.fixture(autouse=True)
def _dynamo():
    with fresh_dynamo(begins=True), float64():
        yield


class Inner(nn.Module):
    """Reads an attribute that is set between calls."""

    def __init__(self, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.function, self.beta = function, 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.beta)


class Model(nn.Module):
    """One function of a float, as an argument in a dictionary and as an attribute."""

    def __init__(self, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layer, self.inner, self.function = nn.Linear(4, 4), Inner(function), function

    def forward(self, x: Tensor, weights: dict[str, float]) -> Tensor:
        hidden = self.layer(x)
        return self.function(hidden, weights["kl"]).sum(1) + self.inner(hidden).sum(1)


def _captures(
    function: Callable[[Tensor, float], Tensor], *, rows: int = 5, dynamic: bool | None = None
) -> int:
    """How many graphs calls with other numbers have; each call gives what the model gives."""
    torch.manual_seed(0)
    model, recorder = Model(function), Recorder()
    compiled = torch.compile(model, backend=recorder, dynamic=dynamic)
    for step, value in enumerate(VALUES):
        x, model.inner.beta = torch.randn(rows + step, 4), value
        found, expected = (call(x, {"kl": 1 - value}) for call in (compiled, model))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return len({graph.fingerprint for graph in recorder.graphs})


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b: x * b + (1 - b) ** 2,
        lambda x, b: x / b if 0 < b < 2 else x,
        lambda x, b: x.clamp(-b, b) * max(b, 0.01),
        lambda x, b: x * (0.5 * (1 + math.cos(math.pi * b))),
        lambda x, b: x + torch.full((x.shape[0], 1), b),
    ],
    ids=["arithmetic", "branch", "bounds", "cosine", "fill"],
)
def test_arithmetic_of_a_number_has_one_graph_for_all_but_its_first_value(function) -> None:
    assert _captures(function) == 2


def test_a_first_batch_of_one_row_changes_nothing() -> None:
    assert _captures(lambda x, b: x * b, rows=1) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b: F.layer_norm(x, (4,), eps=b),
        lambda x, b: F.leaky_relu(x, b),
        lambda x, b: x[:, : int(b * 10)] * b,
        lambda x, b: x * (b * x.shape[0]),
        lambda x, b: x * b if not math.isnan(b) else x,  # Dynamo breaks the graph at a symbol
    ],
    ids=["operator", "slope", "size", "rows", "break"],
)
def test_what_needs_the_number_is_compiled_for_each(function) -> None:
    assert _captures(function) == len(set(VALUES))


def test_both_branches_of_a_number_are_seen() -> None:
    assert _captures(lambda x, b: x * b if b > 0.25 else x - b) in (3, 4)


def test_dynamic_false_leaves_numbers_constants() -> None:
    assert _captures(lambda x, b: x * b, rows=5, dynamic=False) >= len(set(VALUES))


def test_numbers_are_symbolic_from_their_second_value_on() -> None:
    seen = SeenNumbers()
    assert not seen.is_symbolic("a", 0.5) and not seen.is_symbolic("a", 0.5) and not seen.give_up()
    seen = SeenNumbers()
    seen.is_symbolic("a", 0.5)
    assert seen.is_symbolic("a", 0.25) and seen.is_symbolic("a", 0.5), "back at the first value too"
    assert not seen.is_symbolic("b", 0.25)
    assert seen.give_up() and not seen.is_symbolic("a", 0.75) and not seen.give_up()
