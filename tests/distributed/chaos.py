"""What a job in chaos trains, and what one process makes of it.

In: a rank and a step. Out: model, optimizer, the rows that this rank draws from its own generator (a
checkpoint must give it back), and `Alone`, which trains the same in one process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
WORLD = 2
SAVE_EVERY = 5
STEP_LIMIT_SECONDS = 3.0
CAUSE = "planted: the disk is on fire"


def model_of() -> nn.Sequential:
    """Two stages at most, the second from layer 2 on."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    return nn.Sequential(*layers).to(torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With state; an eps that keeps rounding where it is."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-2)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that is another one in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))


def batch_of(rank: int, step: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Rows of a rank: their number depends on the step, their values on what its generator has drawn
    before.
    """
    x = torch.randn(2 + (step + rank) % 3, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.sin(3 * x.roll(1, 1))


class Alone:
    """One process that trains on the rows of all ranks."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = optimizer_of(self.model)
        self.scheduler = scheduler_of(self.optimizer)
        self.generators = [torch.Generator().manual_seed(1000 + rank) for rank in range(WORLD)]

    def step(self, number: int) -> list[float]:
        """The loss of each rank's rows in the next step."""
        batches = [batch_of(rank, number, generator) for rank, generator in enumerate(self.generators)]
        self.optimizer.zero_grad()
        losses = [F.mse_loss(self.model(x), target) for x, target in batches]
        torch.stack(losses).mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        return [loss.item() for loss in losses]
