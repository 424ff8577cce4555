"""Models whose code uses the batch size as a number: loops over rows, halves of a batch, shares of it;
and one that keeps a value of the batch.

In: nothing. Out: `MODELS` by way, `KEPT`: the classes of each that run as written. Each takes rows `x` and labels `y`
as `data_size_models.batch` makes them, and gives its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.data_size_models import Layered, batch

__all__ = ["KEPT", "MODELS", "batch"]


class Numbered(Layered):
    """Rows by their numbers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = [self.last(torch.tanh(self.first(x[row]))) for row in range(x.shape[0])]
        return torch.stack(rows).square().mean() + y.sum() * 0


class Iterated(Layered):
    """Rows one after the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([self.last(torch.tanh(self.first(row))) for row in x]).square().mean()


class LossByRow(Layered):
    """The loss of each row in a loop, as detectors have it; the network is ahead of it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z, total = self.last(torch.tanh(self.first(x))), torch.zeros((), dtype=x.dtype)
        for row in range(len(z)):
            total = total + (z[row].square().mean() + (y[row].double()[:, None] * z[row]).mean()).exp()
        return total / len(z)


class _Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        losses = [
            (self.scale * z[row].square().mean() + y[row].double().mean()).exp() for row in range(len(z))
        ]
        return torch.stack(losses).mean()


class InCriterion(Layered):
    """The same in a module of its own, which alone runs as written."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = _Criterion()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.last(torch.tanh(self.first(x))), y)
        return loss


class Halves(Layered):
    """Two views in one batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        one, other = torch.split(z, (z.shape[0] + 1) // 2)
        return one.square().mean() * other.exp().mean()


class Share(Layered):
    """The hardest share of the samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = self.last(torch.tanh(self.first(x))).flatten(1).square().mean(1)
        return losses.topk(int(0.6 * x.size(0)))[0].mean()


class FirstHalf(Layered):
    """A mean over the first half, and one over the rest."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        half = x.shape[0] // 2
        return z[:half].mean() + z[half:].square().mean() / (x.shape[0] - half)


class Running(Layered):
    """An average of the loss that is kept as a plain attribute, and comes back in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.last(torch.tanh(self.first(x))).square().mean() + y.sum() * 0
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss + self.running


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "numbered": Numbered,
    "iterated": Iterated,
    "loss by row": LossByRow,
    "criterion": InCriterion,
    "halves": Halves,
    "share": Share,
    "first half": FirstHalf,
    "running": Running,
}
KEPT: Mapping[str, str] = {
    "numbered": "Numbered",
    "iterated": "Iterated",
    "loss by row": "LossByRow",
    "criterion": "_Criterion",
}
