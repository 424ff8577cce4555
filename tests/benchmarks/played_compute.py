"""A model whose layers sleep instead of computing, so that ranks which share cores do not fill each other's bubbles.

In: seconds of a layer's forward, of its input gradient and of its weight gradient. Out: `PlayedModel` for this backend (a
loss from its rows), and `played_parts` for torch's pipelining: the same layers in consecutive parts. Every layer has one
parameter, and each of its two gradients sleeps by itself, so that both sides can run them apart. Shapes: rows [B, 1].
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Of one layer and micro-batch."""

    forward: float
    inputs: float
    weights: float


@rannc_backend.row_wise
@torch.library.custom_op("played::forward", mutates_args=())
def _forward(rows: Tensor, weight: Tensor, forward: float, inputs: float, weights: float) -> Tensor:
    time.sleep(forward)
    return rows + weight


@rannc_backend.row_wise
@torch.library.custom_op("played::gradient", mutates_args=())
def _gradient(gradient: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return gradient.clone()


@_forward.register_fake
def _(rows: Tensor, weight: Tensor, forward: float, inputs: float, weights: float) -> Tensor:
    return torch.empty_like(rows)


@_gradient.register_fake
def _(gradient: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[3], inputs[4]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs, weights = ctx.seconds
    return _gradient(gradient, inputs), _gradient(gradient, weights).sum(0), None, None, None


_forward.register_autograd(_backward, setup_context=_setup)


class _Inputs(torch.autograd.Function):
    """Sleeps in the forward and for the gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: LayerSeconds) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds.forward)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds.inputs)
        return gradient.clone(), None


class _Weights(torch.autograd.Function):
    """Sleeps for the gradient of its parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: LayerSeconds) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds.weights)
        return gradient.clone(), None


class PlayedLayer(nn.Module):
    """Adds its parameter to its rows. `by_operators`: one operator of torch.library; else nodes of autograd, which torch's
    pipelining can run apart.
    """

    def __init__(self, seconds: LayerSeconds, *, by_operators: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.by_operators = seconds, by_operators

    def forward(self, rows: Tensor) -> Tensor:
        seconds = self.seconds
        if self.by_operators:
            return torch.ops.played.forward(
                rows, self.weight, seconds.forward, seconds.inputs, seconds.weights
            )
        return _Inputs.apply(rows, seconds) + _Weights.apply(self.weight, seconds)


class _Shift(nn.Module):
    """Gives the rows of the batch a gradient, so that the first layer has an input gradient as the others have."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.shift


def mean_loss(rows: Tensor, target: Tensor | None = None) -> Tensor:
    """Of rows [B, 1]; equal numbers of rows in every micro-batch."""
    return rows.mean()


class PlayedModel(nn.Module):
    """All layers, and the loss."""

    def __init__(self, num_layers: int, seconds: LayerSeconds) -> None:
        super().__init__()
        layers = (PlayedLayer(seconds, by_operators=True) for _ in range(num_layers))
        self.layers = nn.Sequential(*layers)
        self.shift = _Shift()

    def forward(self, rows: Tensor) -> Tensor:
        return mean_loss(self.layers(self.shift(rows)))


def played_parts(num_layers: int, seconds: LayerSeconds, num_parts: int) -> list[nn.Module]:
    """The same layers in consecutive parts of equally many."""
    per_part = num_layers // num_parts
    assert per_part * num_parts == num_layers, f"{num_layers} layers do not make {num_parts} equal parts"
    parts: list[nn.Module] = []
    for index in range(num_parts):
        layers: list[nn.Module] = [PlayedLayer(seconds, by_operators=False) for _ in range(per_part)]
        parts.append(nn.Sequential(*([_Shift()] if index == 0 else []), *layers))
    return parts
