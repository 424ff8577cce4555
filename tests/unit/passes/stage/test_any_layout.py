"""Graphs run on other layouts than they were traced on, and give the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.stage.any_layout import restrided, take_any_layout
from rannc_backend.passes.stage.partition_backward import boxed

aten = torch.ops.aten

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: aten.view.default(x * 1, [24]),
    "unsafe_view": lambda x: aten._unsafe_view.default(x * 1, [4, 6]),
    "view_as_complex": lambda x: torch.view_as_complex(x * 1),
    "view_dtype": lambda x: (x * 1).view(torch.int32),
    "as_strided": lambda x: (x * 1).as_strided((2, 4), (3, 2), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_other_layouts(name: str) -> None:
    function = CASES[name]
    traced_on = torch.randn(3, 4, 2, dtype=torch.float64)
    graph = make_fx(function, tracing_mode="fake")(traced_on)
    given = traced_on.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert given.stride() != traced_on.stride() and torch.equal(given, traced_on)
    (result,) = (boxed(graph)([given]),)
    assert torch.equal(result, function(traced_on))
    take_any_layout(graph.graph)
    graph.recompile()
    assert torch.equal(graph(given), function(traced_on)) and torch.equal(
        graph(traced_on), function(traced_on)
    )


def test_strides_of_single_elements_mean_nothing() -> None:
    value = torch.randn(2, 1, 3)
    assert restrided(value, [3, 77, 1]) is value
    other = restrided(value, [1, 1, 2])
    assert torch.equal(other, value) and other.stride() == (1, 1, 2)
