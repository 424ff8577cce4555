"""Changing in place what backward still needs is an error, never a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.step.versions import refuse_other_gradients


def step(change: Callable[[nn.Module, torch.Tensor, torch.Tensor], object]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    compiled = torch.compile(model, backend="rannc", options={"stage_compiler": "eager", "pipeline_num": 1})
    x = torch.randn(3, 4)
    output = compiled(x)
    loss = output.sum()
    with torch.no_grad():
        change(model, x, output)
    loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model, x, output: output.mul_(2), id="output"),
        pytest.param(lambda model, x, output: x.zero_(), id="input"),
        pytest.param(lambda model, x, output: model[0].weight.add_(1), id="parameter"),
    ],
)
def test_a_change_before_backward_is_refused(change: Callable[..., object]) -> None:
    with pytest.raises(UserInputError, match="modified in place"):
        step(change)


def test_ranks_that_want_other_gradients_are_told() -> None:
    refuse_other_gradients([True, True])
    refuse_other_gradients([False, False])
    with pytest.raises(UserInputError, match="rank 1 asks for gradients of inputs alone .* and rank 0"):
        refuse_other_gradients([True, False, True])


def test_other_tensors_may_change() -> None:
    step(lambda model, x, output: output.clone().mul_(2))
