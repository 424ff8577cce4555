"""Models in which samples of a batch meet: each has one way of it, as users write them.

In: nothing. Out: `MODELS` by what meets. Each takes rows `x` of [rows, WIDTH] and labels `y` of [rows], and gives
its loss and a value with a row per sample, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, NUM_CLASSES = 6, 8, 5


class Encoder(nn.Module):
    """Layers before and after what meets, so that it may be cut twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.third, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, NUM_CLASSES)

    def encoded(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def classified(self, hidden: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.third(hidden)))
        return F.cross_entropy(logits, y), logits


class Contrastive(Encoder):
    """CLIP: each of a batch beside every other."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        images = F.normalize(self.encoded(x), dim=-1)
        texts = F.normalize(self.third(images.tanh()), dim=-1)
        logits = 3.0 * images @ texts.t()
        targets = torch.arange(x.shape[0])
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2, images


class TwoViews(Encoder):
    """SimCLR: two views of each, one after the other in one batch."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        count = x.shape[0]
        both = torch.cat([self.encoded(x), self.encoded(1.1 * x + 0.2)])
        both = F.normalize(self.third(both).tanh(), dim=1)
        similar = (both @ both.t() / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        targets = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return F.cross_entropy(similar, targets), both[:count]


class Redundancy(Encoder):
    """Barlow Twins: correlations over the batch."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = self.encoded(x)
        second = self.third(first.tanh())
        one, other = ((each - each.mean(0)) / (each.std(0) + 0.5) for each in (first, second))
        correlation = one.t() @ other / x.shape[0]
        return (correlation - torch.eye(HIDDEN)).square().sum(), first


class Hardest(Encoder):
    """Triplets with the farthest of the same class and the nearest of another."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.third(self.encoded(x))
        distances = (hidden[:, None] - hidden[None]).square().sum(-1)
        same = y[:, None] == y[None]
        positive = (distances * same).amax(1)
        negative = distances.masked_fill(same, 1e3).amin(1)
        return F.softplus(positive - negative).mean(), hidden


class Shapes(Hardest):
    """A layer that only gives a shape, and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + self.shape(x).new_zeros(x.shape), y)


class Centered(Encoder):
    """Normalisation over the batch, written out."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoded(x)
        return self.classified((hidden - hidden.mean(0)) / (hidden.std(0) + 1), y)


class Reordered(Encoder):
    """A sort over the batch, a sum along it, and the order turned round."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoded(x)
        hidden = hidden[hidden[:, 0].argsort()].cumsum(0)
        return self.classified(hidden + hidden.flip(0), y)


class Attending(Encoder):
    """Attention of each sample to all."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoded(x)[None]
        return self.classified(F.scaled_dot_product_attention(hidden, hidden, hidden)[0], y)


class Clamped(Encoder):
    """T5 in float16: rows clamped by whether any element of the batch is infinite."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoded(x)
        limit = torch.where(torch.isinf(hidden).any(), 0.2, 0.6)
        return self.classified(torch.clamp(hidden, -limit, limit), y)


class Codebook(Encoder):
    """A codebook that follows the batch by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * HIDDEN).view(4, HIDDEN).clone())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoded(x)
        nearest = (hidden[:, None] - self.codes[None]).square().sum(-1).argmin(1)
        chosen = F.one_hot(nearest, 4).to(hidden.dtype)
        quantized = chosen @ self.codes.clone()
        if self.training:
            with torch.no_grad():
                found = (chosen.t() @ hidden) / (chosen.sum(0)[:, None] + 1)
                self.codes.copy_(0.9 * self.codes + 0.1 * found)
        return self.classified(hidden + (quantized - hidden).detach(), y)


class Queue(Encoder):
    """MoCo: keys of earlier batches, in a buffer that moves on."""

    def __init__(self) -> None:
        super().__init__()
        keys = torch.randn(HIDDEN, 12, generator=torch.Generator().manual_seed(1))
        self.register_buffer("keys", F.normalize(keys, dim=0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        query = F.normalize(self.encoded(x), dim=1)
        key = F.normalize(self.third(query), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.keys.clone()], 1)
        with torch.no_grad():
            self.keys.copy_(torch.cat([key.t().mean(1, keepdim=True), self.keys[:, :-1]], 1))
        return F.cross_entropy(logits, torch.zeros_like(y)), query


class Normalized(nn.Module):
    """BatchNorm, whose statistics are those of all samples of the step with `batch_norm="global"`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.other = nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN, momentum=0.3)
        self.head = nn.Linear(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.first(x)).relu()
        logits = self.head(self.other(self.second(hidden)).relu())
        return F.cross_entropy(logits, y), logits


class _Centering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class MeetingGradients(Encoder):
    """Rows that meet in a backward alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.classified(_Centering.apply(self.encoded(x)), y)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "contrastive": Contrastive,
    "two views": TwoViews,
    "redundancy": Redundancy,
    "hardest": Hardest,
    "shapes": Shapes,
    "centered": Centered,
    "reordered": Reordered,
    "attending": Attending,
    "clamped": Clamped,
    "codebook": Codebook,
    "queue": Queue,
    "normalized": Normalized,
    "gradients": MeetingGradients,
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"normalized": {"batch_norm": "global"}}


def batch(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    return x, torch.randint(NUM_CLASSES, (num_rows,), generator=generator)
