"""Outputs that are written into given memory: which ones, and that the graph means the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.stage.fused_operators import is_fused
from rannc_backend.passes.stage.send_slices import storable, write_to_destinations


def _outputs(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    product = x @ weight
    return product, product.relu(), (product + 1).view(-1), x, x.sum(0), product.t().clone(), product[:2]


NAMES = ("product", "relu", "seen", "input", "sum", "clone", "part_of_a_product")
STORED = ("relu", "seen", "sum", "clone")


def _graph() -> fx.GraphModule:
    return make_fx(_outputs, tracing_mode="fake")(*_inputs())


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, generator=generator), torch.randn(3, 5, generator=generator)


def test_what_a_kernel_of_inductor_makes_is_stored() -> None:
    graph = _graph()
    assert [NAMES[index] for index in storable(graph, range(len(NAMES)))] == list(STORED)
    assert storable(graph, [0, 1, 3]) == (1,)
    assert not is_fused(graph.graph.find_nodes(op="placeholder")[0])


@pytest.mark.parametrize("indices", [(), (1,), (1, 2, 4, 5), (2, 4)])
def test_the_graph_writes_and_returns_the_same(indices: tuple[int, ...]) -> None:
    expected = _outputs(*_inputs())
    graph = write_to_destinations(_graph(), indices)
    destinations = [torch.full(tuple(expected[index].shape), torch.nan) for index in indices]
    results = graph(*_inputs(), *destinations)
    rest = [value for index, value in enumerate(expected) if index not in indices]
    assert len(results) == len(rest) and all(torch.equal(a, b) for a, b in zip(results, rest, strict=True))
    assert all(
        torch.equal(memory, expected[index]) for memory, index in zip(destinations, indices, strict=True)
    )


def test_slices_of_one_message_do_not_touch_each_other() -> None:
    message = torch.full((64,), torch.nan)
    expected = _outputs(*_inputs())
    write_to_destinations(_graph(), (1, 4))(*_inputs(), message[:20].view(4, 5), message[32:35])
    assert torch.equal(message[:20].view(4, 5), expected[1]) and torch.equal(message[32:35], expected[4])
    assert message[20:32].isnan().all() and message[35:].isnan().all()
