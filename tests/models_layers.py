"""Models whose layers keep or lay out their state in a way of their own. Terms as in model_entry.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from tests.models_rannc import WIDTH


class ChannelsLast(nn.Module):
    """Convolutions in the memory format that GPUs prefer, pooled to one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(3 if index == 0 else WIDTH, WIDTH, 3, padding=1) for index in range(4)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x))
        return self.head(self.pool(x).flatten(1))


class Gated(nn.Module):
    """Binary cross entropy of a gate, which torch writes with factories like those of the user's here: they
    read types, not values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * x.new_full((WIDTH,), 0.9) + x.new_zeros(x.shape[0], 1)
        x = x + x.new_ones(())
        return F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(target)), x


class SpectralNorm(nn.Module):
    """Each call in training improves buffers that the weights are divided by, and that have nothing to do
    with the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class TiedRing(nn.Module):
    """Three pairs of layers of which each has one weight with each other pair; backward comes to them in a
    ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        for layer, tied in zip(self.layers[:3], self.layers[3:]):
            tied.weight = layer.weight

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, target), x


class Parted(nn.Module):
    """Parts of several layers, whose results the model marks; one value goes past them all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate(x))
        for part in self.parts:
            x = rannc_backend.checkpoint_tensor(x + gate * torch.tanh(part(x)))
        return F.mse_loss(x, target), x
