"""What Dynamo is told of a model whose parameters have moved while it was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.deployment import Deployer
from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.runtime.parameters import Moved, ParameterTable
from rannc_backend.session import Session


def _move(model: nn.Linear) -> None:
    """The same values at other strides, as the model's own tensors."""
    model.weight.data = model.weight.data.t().contiguous().t()


def test_an_error_after_parameters_have_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)

    def refuse(*_: Any) -> None:
        _move(model)
        raise UserInputError("the cause", cure="none")

    monkeypatch.setattr(Session, "runtime_for", refuse)
    torch._dynamo.reset()
    with pytest.raises(UserInputError, match="the cause"):
        torch.compile(model, backend="rannc")(torch.randn(5, 4))


def test_parameters_that_moved_for_a_graph_that_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second capture, without lengths, runs in the same trace of Dynamo's."""
    model, deploy, settle = nn.Linear(4, 3).double(), Deployer.deploy, ParameterTable.settle
    refused: list[str] = []

    def settled(self: ParameterTable, *args: Any, **options: Any) -> Moved:
        settle(self, *args, **options)
        _move(model)
        return Moved(made_bytes=1)

    def deployed_later(self: Deployer, *args: Any, **options: Any) -> Any:
        if not refused:
            refused.append("once")
            raise UnsupportedModelError("with lengths it cannot be deployed", cure="none")
        return deploy(self, *args, **options)

    monkeypatch.setattr(ParameterTable, "settle", settled)
    monkeypatch.setattr(Deployer, "deploy", deployed_later)
    torch._dynamo.reset()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    options = {"stage_compiler": "eager", "plan_cache": False, "costs": "analytic"}
    out = torch.compile(model, backend="rannc", options=options)(x)
    assert refused == ["once"]
    torch.testing.assert_close(out.detach(), nn.functional.linear(x, model.weight, model.bias).detach())
