"""A backward graph cut in two computes what it did, each call once, and what is kept is what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.pipeline import count_ops, run_pass, with_facts
from rannc_backend.passes.stage.split_backward import BackwardParts, SplitBackward

aten = torch.ops.aten
Function = Callable[..., tuple[Tensor, ...]]


def _perceptron(x: Tensor, h: Tensor, w: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, w, v and a bias, of v tanh(w x + b) from its saved values."""
    through = (g @ v.t()) * (1 - h * h)
    return through @ w.t(), x.t() @ through, h.t() @ g, through.sum(0)


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return aten.native_layer_norm_backward(g, x, [3], mean, rstd, weight, weight, [True, True, True])


def _convolved(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return aten.convolution_backward(g, x, w, [2], [1], [0], [1], False, [0], 1, [True, True, True])


def _twice(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A parameter that is used twice, whose gradient is another's too."""
    first = x.t() @ g
    total = first + x.t() @ (g @ w.t() @ w)
    return g @ w.t(), total, first


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "perceptron": (_perceptron, ((4, 3), (4, 5), (3, 5), (5, 2), (4, 2)), (1, 2, 3)),
    "no input": (lambda *v: _perceptron(*v)[1:], ((4, 3), (4, 5), (3, 5), (5, 2), (4, 2)), (0, 1, 2)),
    "normalization": (_normalized, ((4, 3), (4, 1), (4, 1), (3,), (4, 3)), (1, 2)),
    "convolution": (_convolved, ((2, 3, 5), (2, 3, 1), (2, 2, 5)), (1, 2)),
    "used twice": (_twice, ((4, 3), (3, 3), (4, 3)), (1, 2)),
    "an input that is a gradient": (lambda x, g: (g * x, g, x.t() @ g), ((4, 3), (4, 3)), (1, 2)),
}


def split(name: str, mode: str = "real") -> tuple[fx.GraphModule, list[Tensor], BackwardParts]:
    function, shapes, parameters = CASES[name]
    torch.manual_seed(0)
    values = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    graph_module = make_fx(function, tracing_mode=mode)(*values)
    with_facts(graph_module, SplitBackward.requires)
    return graph_module, values, run_pass(SplitBackward(parameters), graph_module)


def run_parts(parts: BackwardParts, values: Sequence[Tensor], parameters: Sequence[int]) -> list[Any]:
    """The gradients in the sequence of the given graph."""
    first = list(parts.first(*values))
    second = iter(parts.second(*first[parts.num_returned :]))
    returned = iter(first[: parts.num_returned])
    number = parts.num_returned + len(parameters)
    return [next(second if place in parameters else returned) for place in range(number)]


@pytest.mark.parametrize("name", CASES)
def test_the_two_parts_give_what_the_graph_gave(name: str) -> None:
    graph_module, values, parts = split(name)
    results = run_parts(parts, values, CASES[name][2])
    expected = graph_module(*values)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", CASES)
def test_every_call_is_in_one_part(name: str) -> None:
    graph_module, _, parts = split(name)
    both = count_ops(parts.first) + count_ops(parts.second)
    once = count_ops(graph_module)
    if name == "convolution":  # one call that computes two products becomes two that compute one each
        once += Counter({"aten.convolution_backward.default": 1})
    assert both == once


def test_what_takes_time_is_left_to_the_second_part() -> None:
    assert count_ops(split("perceptron")[2].second)["aten.mm.default"] == 2
    assert not count_ops(split("no input")[2].first), "nobody waits for anything"
    assert not count_ops(split("normalization")[2].second), (
        "its gradients come out of the kernel of the first"
    )
    parts = split("convolution")[2]
    masks = [
        node.args[10]
        for graph in (parts.first, parts.second)
        for node in graph.graph.nodes
        if node.target is aten.convolution_backward.default
    ]
    assert masks == [[True, False, False], [False, True, True]]


def test_what_is_kept_is_counted_once_without_what_stays_anyway() -> None:
    parts = split("perceptron", "fake")[2]
    names = {node.name for node in parts.kept}
    inputs = [node.name for node in parts.first.graph.find_nodes(op="placeholder")]
    assert {inputs[0], inputs[1], inputs[4]} <= names and inputs[2] not in names
    # x, h, g, the gradient before the activation, and the gradient of the bias, which is there already.
    assert parts.kept_bytes(()) == 8 * (4 * 3 + 4 * 5 + 4 * 2 + 4 * 5 + 5)
    assert parts.kept_bytes(inputs[:1]) == 8 * (4 * 5 + 4 * 2 + 4 * 5 + 5)


def test_sizes_of_what_is_kept_come_along() -> None:
    def function(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        wide = g.sin().view(-1)
        return wide, x.t() @ wide.view(-1, 2).cos()

    graph_module = make_fx(function, tracing_mode="symbolic")(torch.rand(4, 3), torch.rand(4, 2))
    with_facts(graph_module, SplitBackward.requires)
    parts = run_pass(SplitBackward((1,)), graph_module)
    symbols = {
        symbol
        for node in parts.second.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    given = {
        node.meta["val"].node.expr
        for node in parts.second.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt)
    }
    assert symbols and symbols <= given
