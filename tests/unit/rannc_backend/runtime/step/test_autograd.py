"""What torch.autograd.grad takes is taken on as it is, where no compiled model is part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from rannc_backend.runtime.step.autograd import refuse_gradients_by_name

WAYS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "generator": lambda tensor: (each for each in [tensor]),
    "edge": get_gradient_edge,
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("of", WAYS)
@pytest.mark.parametrize("by", WAYS)
def test_gradients_of_other_models_are_torchs(of: str, by: str, create_graph: bool) -> None:
    undo = refuse_gradients_by_name(lambda: [])
    try:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(WAYS[of]((x**3).sum()), WAYS[by](x), create_graph=create_graph)
    finally:
        undo()
    assert gradient.tolist() == [3.0, 12.0] and gradient.requires_grad is create_graph
