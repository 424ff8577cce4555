"""Checks of ranks that capture the same nodes in orders of their own, as forwards do that go through a set of strings.

In: a context. Out: findings. Every function is collective.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.distributed.harness.context import Context
from tests.distributed.noticed_checks import WIDTH, rows_of
from tests.odd_models import worst_error


def order_of_sets(context: Context) -> None:
    """Both ways of capture."""
    for capture in ("auto", "nonstrict"):
        _through_a_set(context, capture)


def _through_a_set(context: Context, capture: str) -> None:
    """Each rank has the same nodes in an order of its own, in two graphs; then rank 1 has others."""
    names = ("sin", "cos", "tanh", "sigmoid") if context.rank == 0 else ("tanh", "sigmoid", "cos", "sin")

    def model_of(names: tuple[str, ...]) -> nn.Module:
        return _InTheOrderOfASet(names).to(context.dtype)

    model, alone, compiled, optimizers = context.pair(lambda: model_of(names), capture=capture)
    for step in range(4):
        own, every = rows_of(context, step)
        for each in (model, alone):
            each.train(step < 2)
        losses = [compiled(own), alone(every)]
        for loss in losses:
            loss.backward()
        error = max(float((losses[0] - losses[1]).detach().abs()), worst_error(model, alone))
        context.findings.that(error <= context.tolerance, f"order of a set, step {step}: off by {error}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _, _, compiled, _ = context.pair(lambda: model_of(names[:3]), capture=capture)
    context.findings.raises("other nodes", ("RanksDifferError",), lambda: compiled(own))


class _InTheOrderOfASet(nn.Module):
    """What a forward does that goes through a set of strings, with a constant for each."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.First, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scales = {
            name: torch.tensor([float(len(name)), 2.0 * len(name)], dtype=x.dtype) for name in self.names
        }
        hidden = self.second(self.First(x))
        if self.training:
            hidden = hidden * 0.5
        values = {name: getattr(torch, name)(hidden) * scales[name].sum() for name in self.names}
        return sum((values[name] for name in sorted(values)), hidden).mean()
