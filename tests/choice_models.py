"""Models in which a mask chooses elements of the rows of a batch, as users write them; each takes x [rows, TOKENS, WIDTH]
and labels [rows, TOKENS], of which some are IGNORED, and gives its loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import data_size_models
from tests.data_size_models import TOKENS, WIDTH, Layered

IGNORED = -100


class _Layered(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class MaskedLanguageHead(_Layered):
    """A language model's head for the masked tokens alone."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels != IGNORED
        scores = self.last(self.norm(F.gelu(self.hidden(x)[mask])))
        return F.cross_entropy(scores, labels[mask])


class FlatHead(_Layered):
    """The same over flattened tokens, with smoothed labels and a regularizer."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels.view(-1) != IGNORED
        scores = self.last(self.hidden(x).view(-1, WIDTH)[mask])
        loss = F.cross_entropy(scores, labels.view(-1)[mask], label_smoothing=0.1)
        return loss + 0.1 * scores.square().mean()


class Unpadded(_Layered):
    """Padding is taken out before all layers."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = x[labels != IGNORED]
        return F.mse_loss(self.last(self.hidden(kept)), kept)


class Counted(_Layered):
    """The number of chosen elements as a number, in what users compute from it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chosen = self.last(self.hidden(x)[labels != IGNORED])
        return chosen.square().sum() / (chosen.shape[0] + 1) + chosen.std()


class PutBack(data_size_models.PutBack):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels != IGNORED)


class ChosenRows(_Layered):
    """Samples of one kind go through a layer of their own, and have a loss of their own."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden, chosen = self.first(x), labels[:, 0] > WIDTH // 2
        extra = torch.tanh(self.second(hidden[chosen]))
        changed = torch.zeros_like(hidden)
        changed[chosen] = extra
        return self.last(changed + hidden).square().mean() + (extra * torch.ones_like(extra)).sum()


class TwoMasks(_Layered):
    """Two choices that have nothing to do with each other."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(x)
        scores = self.last(hidden[labels != IGNORED])
        others = hidden[labels == IGNORED]
        return F.cross_entropy(scores, labels[labels != IGNORED]) + F.l1_loss(
            others, torch.zeros_like(others)
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "masked language head": MaskedLanguageHead,
    "flat head": FlatHead,
    "unpadded": Unpadded,
    "counted": Counted,
    "put back": PutBack,
    "chosen rows": ChosenRows,
    "two masks": TwoMasks,
}


def batch(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs in float64; nothing is chosen of the last row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(WIDTH, (num_rows, TOKENS), generator=generator)
    chosen = torch.rand(num_rows, TOKENS, generator=generator) > 0.6
    chosen[-1], chosen[0, :2] = False, True
    labels[0, 0] = WIDTH - 1
    return x, torch.where(chosen, labels, IGNORED)
