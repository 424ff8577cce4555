"""Operators of users on rows of the batch: declared ones keep rows, all others, and what cannot be right, are
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.passes.batch.batch_axis import analyze_batch_axis
from rannc_backend.passes.batch.row_wise import is_row_wise, row_wise
from rannc_backend.passes.pipeline import PassError
from tests.unit.passes.batch.batch_tracing import trace


@torch.library.custom_op("test_row_wise::first", mutates_args=())
def first(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


@row_wise
@torch.library.custom_op("test_row_wise::second", mutates_args=())
def second(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def test_only_what_is_declared_is_row_wise() -> None:
    assert not is_row_wise(torch.ops.test_row_wise.first.default)
    assert is_row_wise(torch.ops.test_row_wise.second.default)
    assert not is_row_wise(torch.ops.aten.relu.default) and not is_row_wise(len)


def test_forms_of_a_declaration() -> None:
    assert row_wise(torch.ops.test_row_wise.first) is torch.ops.test_row_wise.first
    assert is_row_wise(torch.ops.test_row_wise.first.default)
    for wrong in (torch.relu, "name", lambda x: x):
        with pytest.raises(TypeError, match="no operator of torch.library"):
            row_wise(wrong)  # type: ignore[type-var]


def _custom(name: str, function: Any, backward: Any) -> Any:
    @torch.library.custom_op(f"test_row_wise::{name}", mutates_args=())
    def operator(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return function(values, weight).clone()

    operator.register_fake(lambda values, weight: torch.empty_like(values))
    operator.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return row_wise(operator)


def _product(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, weight = ctx.saved_tensors
    return grad * weight, (grad * values).sum(0)


def _mean(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, weight = ctx.saved_tensors
    return grad * weight, (grad * values).mean(0)


def _spread(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, weight = ctx.saved_tensors
    return (grad * weight).mean(0, keepdim=True).expand_as(values), (grad * values).sum(0)


def _raises(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise ValueError("these are no values of mine")


OPERATORS = {
    "right": (torch.mul, _product, None),
    "centred": (lambda values, weight: values - values.mean(0), _product, "other results"),
    "of_the_first": (lambda values, weight: values - values[:1], _product, "other results"),
    "of_the_neighbour": (lambda values, weight: values + values.roll(1, 0), _product, "other results"),
    "numbered": (
        lambda values, weight: values * torch.arange(values.shape[0]).view(-1, 1),
        _product,
        "other results",
    ),
    "random": (lambda values, weight: values * torch.rand_like(values), _product, "other results"),
    "mean_of_weight": (torch.mul, _mean, "other gradients"),
    "spread": (torch.mul, _spread, "other gradients"),
    "raises": (_raises, _product, None),
}
DECLARED = {name: _custom(name, function, backward) for name, (function, backward, _) in OPERATORS.items()}


@pytest.mark.parametrize("name", list(OPERATORS))
@pytest.mark.parametrize("flattened", [False, True])
def test_declarations_are_tried(name: str, flattened: bool) -> None:
    """Rows of the operator are samples, or several rows belong to one sample."""
    message = OPERATORS[name][2]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            given = values.flatten(0, 1) if flattened else values
            result: torch.Tensor = DECLARED[name](given, self.weight).view(values.shape)
            return result

    traced = trace(Model(), {"values": torch.rand(4, 3, 2) if flattened else torch.rand(4, 2)})
    before = torch.get_rng_state()
    if message is None:
        analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)
        assert torch.equal(torch.get_rng_state(), before)
        return
    with pytest.raises(PassError, match=message):
        analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)
