"""What is written into a value that had no gradient keeps its gradient, whichever way a model is captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.default_dtype import float64


class IntoZeros(nn.Module):
    """A tensor made like another one, filled in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def middle(self, hidden: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        found[:, :2] = 2 * hidden[:, :2]
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


class IntoStopped(IntoZeros):
    """A value computed without gradients, filled in part."""

    def middle(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            found = 2 * hidden
        found[:, :2] = hidden[:, :2]
        return found


class IntoDetached(IntoZeros):
    """A copy, added to."""

    def middle(self, hidden: Tensor) -> Tensor:
        found = hidden.detach().clone()
        found += hidden.sin()
        return found


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
@pytest.mark.parametrize("make", [IntoZeros, IntoStopped, IntoDetached])
def test_gradients_are_those_of_the_plain_model(make: type[IntoZeros], capture: str) -> None:
    torch._dynamo.reset()
    with float64():
        torch.manual_seed(0)
        model = make()
        alone = copy.deepcopy(model)
        options = {"capture": capture, "pipeline_num": 2, "costs": "rules", "cluster": "generic-cpu"}
        compiled = torch.compile(model, backend="rannc", options={**options, "stage_compiler": "eager"})
        x = torch.randn(5, 4)
        compiled(x).backward()
        alone(x).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=1e-14)
