"""Functions with a backward of their own that no operator of a graph can hold, as people write them: the module that calls
one runs as written.

In: nothing. Out: `MODELS` by way. Each takes rows `x` of [rows, LENGTH, WIDTH] and gives its loss, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.nonstrict_models import WIDTH, Around, Ends


class _Reversal(torch.autograd.Function):
    """The gradient reversal of domain-adversarial training, which asks the module for its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.module.alpha * gradient, None


class _Checkpointed(torch.autograd.Function):
    """As models of diffusion have it: parameters are passed beside the function that reads them."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        return (None, *torch.autograd.grad(result, (x, *ctx.parameters), gradient))


class _StraightThrough(torch.autograd.Function):
    """Its gradient is that of its result."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Rounding(_StraightThrough):
    """A straight-through estimator with a scale by the largest value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        step = x.abs().max().item() / 7
        return (x / step).round() * step


class _Drawing(_StraightThrough):
    """Rounds at random; here the random numbers do not matter, so that results can be compared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.where(torch.rand_like(x) < 2.0, x.round(), x)


class _InPlace(_StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.clamp_(-0.3, 0.3)


class Layer(nn.Module):
    """A layer whose result goes through one of them."""

    def __init__(self, way: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.alpha = way, 0.5
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


class Whole(Ends):
    """The model's own forward calls one."""

    def middle(self, x: Tensor) -> Tensor:
        return _Drawing.apply(x)


def _model(way: Callable[[Layer, Tensor], Tensor]) -> nn.Module:
    return Around(Layer(way))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a module": lambda: _model(lambda own, x: _Reversal.apply(own.layer(x), own)),
    "a checkpoint": lambda: _model(
        lambda own, x: _Checkpointed.apply(own.layer.forward, x, *own.layer.parameters())
    ),
    "a value": lambda: _model(lambda own, x: _Rounding.apply(own.layer(x))),
    "random numbers": lambda: _model(lambda own, x: _Drawing.apply(own.layer(x))),
    "in place": lambda: _model(lambda own, x: _InPlace.apply(own.layer(x) * 1.0)),
}
