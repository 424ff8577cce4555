"""Operators of torch.library on two ranks (docs/custom_operators.md): `custom_operator_worker.py CASE STAGES
COMPILER`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import rannc_backend


@torch.library.custom_op("docs::squash", mutates_args=(), tags=(torch.Tag.pointwise,))
def squash(values: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.tanh(values * scale)


@squash.register_fake
def _(values: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(values)


def keep_result(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def squash_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (result,) = ctx.saved_tensors
    return gradient * (1 - result * result) * ctx.scale, None


squash.register_autograd(squash_backward, setup_context=keep_result)


@rannc_backend.row_wise
@torch.library.custom_op("docs::unit_rows", mutates_args=())
def unit_rows(values: torch.Tensor) -> torch.Tensor:
    return values / values.norm(dim=-1, keepdim=True)


@torch.library.custom_op("docs::mean_of_rows", mutates_args=())
def mean_of_rows(values: torch.Tensor) -> torch.Tensor:
    return values - values.mean(0, keepdim=True)


@rannc_backend.row_wise
@torch.library.custom_op("docs::centred", mutates_args=())
def centred(values: torch.Tensor) -> torch.Tensor:
    return values - values.mean(0, keepdim=True)


@torch.library.custom_op("docs::count", mutates_args=(), tags=(torch.Tag.pointwise,))
def count(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    return values / num_rows


@torch.library.custom_op("docs::bump", mutates_args=("values",))
def bump(values: torch.Tensor) -> None:
    values.add_(1)


def keep_input(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def unit_rows_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    values, result = ctx.saved_tensors
    along = (gradient * result).sum(-1, keepdim=True)
    return (gradient - result * along) / values.norm(dim=-1, keepdim=True)


for operator in (unit_rows, mean_of_rows, centred):
    operator.register_fake(lambda values: torch.empty_like(values))
unit_rows.register_autograd(unit_rows_backward, setup_context=keep_input)
mean_of_rows.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0, keepdim=True))
count.register_fake(lambda values, num_rows: torch.empty_like(values))
count.register_autograd(lambda ctx, gradient: (gradient, None))


class Model(nn.Module):
    """Two layers, and the operator of the case between them."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if self.case == "pointwise":
            hidden = torch.ops.docs.squash(hidden, 0.5) + torch.ops.docs.squash(self.first.bias, 2.0)
        elif self.case == "row_wise":
            hidden = torch.ops.docs.unit_rows(hidden)
        elif self.case == "turned":
            hidden = torch.ops.docs.unit_rows(hidden.t()).t()
        elif self.case == "undeclared":
            hidden = torch.ops.docs.mean_of_rows(hidden)
        elif self.case == "declared_wrongly":
            hidden = torch.ops.docs.centred(hidden)
        elif self.case == "row_count":
            hidden = torch.ops.docs.count(hidden, hidden.shape[0])
        else:
            hidden = hidden * 1
            torch.ops.docs.bump(hidden)
        return self.second(hidden).square().mean()


def main(case: str, num_stages: int, compiler: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    plain, model = Model(case), Model(case)
    model.load_state_dict(plain.state_dict())
    options = {
        "partition_num": num_stages,
        "pipeline_num": 2,
        "costs": "rules",
        "cluster": "generic-cpu",
        "whole_batch": "never",
        "stage_compiler": compiler,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    rank, num_ranks = rannc_backend.get_rank(), rannc_backend.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for batch in torch.randn(3, 4 * num_ranks, 4):
        losses = [plain(batch), compiled(batch.chunk(num_ranks)[rank])]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    state = model.state_dict()
    if rank == 0:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
        print("as in one process", flush=True)


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
