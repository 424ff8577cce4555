"""Models with sizes that depend on data, as users write them. Each takes x [rows, 6, 8] and a mask [rows, 6]
and gives its loss, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, WIDTH = 6, 8


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))


class Selected(Layered):
    """A head that is computed for masked tokens alone."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return (self.last(hidden[mask]) - x[mask]).square().mean()


class SelectedEarly(Layered):
    """Padding taken out before all layers."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.last(torch.tanh(self.second(torch.tanh(self.first(x[mask])))))
        return hidden.square().sum() / mask.sum()


class PutBack(Layered):
    """Some tokens are changed, and the rest goes on as it was."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        changed = hidden.clone()
        changed[mask] = torch.tanh(self.second(hidden[mask]))
        return self.last(changed).square().mean()


class AdaptedRows(Layered):
    """Samples of a language, all their tokens, go through its adapter: its layer flattens a size of data."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden, chosen = self.first(x), mask[:, 0]
        changed = torch.zeros_like(hidden)
        changed[chosen] = torch.tanh(self.second(hidden[chosen]))
        return self.last(changed + hidden).square().mean()


class Experts(Layered):
    """Two layers, each of which sends its tokens to one of its experts, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))

    def _mixed(self, hidden: Tensor, experts: list[nn.Module]) -> Tensor:
        weight, chosen = torch.softmax(hidden[:, : len(experts)], -1).max(-1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(experts):
            (places,) = torch.where(chosen == number)
            mixed.index_add_(0, places, expert(hidden[places]) * weight[places, None])
        return mixed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self._mixed(self.first(x).reshape(-1, WIDTH), list(self.experts[:2]))
        hidden = self._mixed(self.second(torch.tanh(hidden)), list(self.experts[2:]))
        return functional.mse_loss(self.last(hidden).view_as(x), x)


class Detected(Layered):
    """The loss of a detector: logits of the cells with an object, and of those without."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        there, empty = logits[..., 0][mask], logits[..., 0][~mask]
        loss = functional.binary_cross_entropy_with_logits(there, torch.ones_like(there))
        loss = loss + functional.binary_cross_entropy_with_logits(empty, torch.zeros_like(empty))
        return loss - functional.logsigmoid(logits[..., 1:][mask]).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "detected": Detected,
    "selected": Selected,
    "selected early": SelectedEarly,
    "put back": PutBack,
    "adapted rows": AdaptedRows,
    "experts": Experts,
}


def batch(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs; each mask has at least one token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_rows, TOKENS, generator=generator) > 0.6
    mask[:, 0] = True
    return x, mask
