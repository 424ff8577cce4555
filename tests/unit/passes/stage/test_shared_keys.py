"""Keys of random numbers that are read from memory: fewer operators per element, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.batch.randomness import element_keys, mix, row_keys
from rannc_backend.passes.stage.shared_keys import keep_shared_keys

AS_STRIDED = torch.ops.aten.as_strided.default


def masks(x: Tensor, seed: Tensor, first: Tensor) -> Tensor:
    """Two masks of the same shape, as `randomness` makes them."""
    rows, elements = row_keys(seed, first, x.shape[0], x.device), element_keys(6, x.device)
    return x * (mix(mix(rows ^ 3).view(-1, 1) ^ elements.view(1, 6)) > 5) + (
        mix(rows ^ 4).view(-1, 1) ^ elements.view(1, 6)
    )


def traced(symbolic: bool) -> fx.GraphModule:
    values = (torch.randn(4, 6), torch.tensor(7), torch.tensor(2))
    return make_fx(masks, tracing_mode="symbolic" if symbolic else "fake")(*values)


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_same_numbers(symbolic: bool) -> None:
    graph_module = traced(symbolic)
    assert keep_shared_keys(graph_module) == 3  # the elements, and the rows of either mask
    graph_module.recompile()
    kept = graph_module.graph.find_nodes(op="call_function", target=AS_STRIDED)
    assert len(kept) == 3 and all(node.users for node in kept)
    # In a graph of the compiler every view of two dimensions is of memory now.
    views = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    assert {node.args[0] for node in views} == set(kept)
    for num_rows in (4, 9) if symbolic else (4,):
        x = torch.randn(num_rows, 6)
        assert torch.equal(
            graph_module(x, torch.tensor(7), torch.tensor(2)), masks(x, torch.tensor(7), torch.tensor(2))
        )


def test_vectors_that_are_no_keys_stay() -> None:
    """A vector from outside, and one of few operators."""
    graph_module = make_fx(
        lambda x, v: x * v.exp().sin().cos().tan().exp().view(1, 6) + (torch.arange(6) * 2).view(1, 6)
    )(torch.randn(4, 6), torch.randn(6))
    before = graph_module.code
    assert keep_shared_keys(graph_module) == 0
    assert graph_module.code == before


def test_on_other_devices_nothing_changes() -> None:
    graph_module = traced(symbolic=False)
    for node in graph_module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = node.meta["val"].to("meta")
    assert keep_shared_keys(graph_module) == 0
