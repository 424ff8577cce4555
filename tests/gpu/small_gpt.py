"""A small GPT with its loss inside, and plain torch's numbers for it: what the GPU tests compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.gpt_model import Gpt, Sizes

SIZES = Sizes(num_layers=4, width=64, num_heads=4, vocabulary=128, length=32, rows=8)
OPTIONS: dict[str, Any] = {"report_steps": 0, "costs": "analytic", "outputs": "loss"}


def make_model(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Gpt:
    """Equal weights for equal seeds, on any device and rank."""
    torch.manual_seed(seed)
    return Gpt(SIZES).to(dtype).to(device)


def make_tokens(device: torch.device | str, step: int = 0, rows: int = SIZES.rows) -> Tensor:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(SIZES.vocabulary, (rows, SIZES.length), generator=generator).to(device)


def train(
    model: nn.Module, call: Callable[[Tensor], Tensor], batches: list[Tensor], *, factor: float = 1.0
) -> list[float]:
    """Some steps of SGD; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(batch)
        (loss * factor).backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def worst_difference(model: nn.Module, reference: nn.Module) -> float:
    """Largest relative difference of the parameters that both have values of, and of their gradients."""
    worst = 0.0
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue  # another rank's
        for actual, wanted in ((parameter, expected[name]), (parameter.grad, expected[name].grad)):
            scale = wanted.detach().abs().max().clamp(min=1e-12)
            worst = max(
                worst, float((actual.detach().to(wanted.device) - wanted.detach()).abs().max() / scale)
            )
    return worst
