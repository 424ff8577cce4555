"""A scatter of one value per row is a choice, with the same values; any other scatter is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.stage.equal_values import share_equal_values
from rannc_backend.passes.stage.single_scatters import choose_instead_of_scatter

aten = torch.ops.aten
X = torch.linspace(-2.0, 3.0, 60, dtype=torch.float64).view(3, 4, 5)


def _changed(
    function: Callable[..., tuple[Tensor, ...]], *values: Tensor, mode: str = "symbolic"
) -> tuple[int, fx.GraphModule]:
    """How many scatters are choices; the graph gives the same as before, bit for bit."""
    graph_module = make_fx(function, tracing_mode=mode)(*values)
    shape_env = next(
        n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"
    ).fake_mode.shape_env
    num_guards = len(shape_env.guards) if shape_env else 0
    number = choose_instead_of_scatter(graph_module.graph)
    assert not shape_env or len(shape_env.guards) == num_guards
    graph_module.graph.lint()
    graph_module.recompile()
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.where.self):
        assert node.meta["val"].dtype == node.args[1].meta["val"].dtype
        assert node.meta["val"].shape == torch.broadcast_shapes(*(arg.meta["val"].shape for arg in node.args))
    for found, expected in zip(graph_module(*values), function(*values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return number, graph_module


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_value_per_row(dim: int, dtype: torch.dtype) -> None:
    def backward_of_gather(x: Tensor, index: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return x.gather(dim, index), torch.zeros(3, 4, 5, dtype=dtype).scatter_add(dim, index, value)

    x = X.to(dtype)
    index = x.narrow(dim, 0, 1).abs().long() % x.shape[dim]
    value = x.narrow(dim, 1, 1)
    number, _ = _changed(backward_of_gather, x, index, value, mode="fake")
    assert number == 1


@pytest.mark.parametrize("loss", [nn.functional.nll_loss, nn.functional.cross_entropy])
def test_the_gradient_of_a_loss(loss: Callable[..., Tensor]) -> None:
    """As the passes spell it: a gather, its sum, and the derivative; rows are symbolic."""

    def both(scores: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        wanted = torch.where(target == -100, 0, target).unsqueeze(1)
        logarithms = scores.log_softmax(1) if loss is nn.functional.cross_entropy else scores
        taken = torch.where(target == -100, 0.0, -logarithms.gather(1, wanted).squeeze(1))
        (gradient,) = torch.autograd.grad(taken.sum(), scores)
        return taken.sum(), gradient

    scores = X.reshape(12, 5).clone().requires_grad_()
    target = torch.arange(12) % 5
    target[3] = -100
    graph_module = make_fx(both, tracing_mode="symbolic")(scores, target)
    found = choose_instead_of_scatter(graph_module.graph)
    graph_module.recompile()
    summed, gradient = graph_module(scores, target)
    torch.testing.assert_close(summed, loss(scores, target, reduction="sum"), rtol=1e-14, atol=0)
    (expected,) = torch.autograd.grad(loss(scores, target, reduction="sum"), scores)
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=1e-16)
    # With the number of classes as a symbol there is nothing to compare with.
    assert found == 0
    fixed = make_fx(both, tracing_mode="fake")(scores, target)
    assert choose_instead_of_scatter(fixed.graph) == 1


INDEX, VALUE = torch.tensor([[0], [4], [2]]), torch.ones(3, 1, dtype=torch.float64)
ROWS = X[:, 0]


@pytest.mark.parametrize(
    "function",
    [
        # The index is checked by nothing else, or by rows of another length, or along another dimension.
        lambda x, i, v: (torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, v),),
        lambda x, i, v: (
            torch.cat([x, x], 1).gather(1, i),
            torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, v),
        ),
        lambda x, i, v: (
            x.new_ones(5, 1).gather(0, i),
            torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, v),
        ),
        # Not zeros; not all rows; several values of a row, which may meet.
        lambda x, i, v: (x.gather(1, i), torch.ones(3, 5, dtype=torch.float64).scatter_add(1, i, v)),
        lambda x, i, v: (x.gather(1, i), torch.zeros(4, 5, dtype=torch.float64).scatter_add(1, i, v)),
        lambda x, i, v: (
            x.gather(1, torch.cat([i, i], 1)),
            torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, torch.cat([i, i], 1), torch.cat([v, v], 1)),
        ),
        # More values than indices.
        lambda x, i, v: (
            x.gather(1, i),
            torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, torch.cat([v, v], 1)),
        ),
    ],
)
def test_other_scatters_are_left_alone(function: Callable[..., tuple[Tensor, ...]]) -> None:
    graph_module = make_fx(function, tracing_mode="fake")(ROWS, INDEX, VALUE)
    share_equal_values(graph_module.graph)
    assert choose_instead_of_scatter(graph_module.graph) == 0


def test_an_index_outside_of_its_row_stays_an_error() -> None:
    def function(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return x.gather(1, i), torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, v)

    number, graph_module = _changed(function, ROWS, INDEX, VALUE, mode="fake")
    assert number == 1
    with pytest.raises(RuntimeError, match="out of bounds"):
        graph_module(ROWS, INDEX + 5, VALUE)


def test_an_index_from_the_end_is_one_as_in_compiled_indexing() -> None:
    """Inductor's gather takes -1 for the last of a row, without a word."""

    def function(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return x.gather(1, i), torch.zeros(3, 5, dtype=torch.float64).scatter_add(1, i, v)

    _, graph_module = _changed(function, ROWS, INDEX, VALUE, mode="fake")
    (gather,) = graph_module.graph.find_nodes(op="call_function", target=aten.gather.default)
    gather.replace_all_uses_with(gather.all_input_nodes[0])
    graph_module.graph.erase_node(gather)
    graph_module.recompile()
    assert torch.equal(graph_module(ROWS, INDEX - 5, VALUE)[1], function(ROWS, INDEX, VALUE)[1])
