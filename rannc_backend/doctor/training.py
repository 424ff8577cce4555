"""The last check of `rannc doctor`: a small model trains some steps over two stages, beside one process with
all rows.

In: the ranks of a job, this process's options. Out: losses and parameters beside those of plain PyTorch, on
rank 0.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

_NUM_STEPS = 3
_ROWS_PER_RANK = 4
_NUM_FEATURES, _WIDTH, _NUM_CLASSES = 8, 32, 4
_LEARNING_RATE = 0.5


class _SmallModel(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_NUM_FEATURES, _WIDTH)
        self.second = nn.Linear(_WIDTH, _NUM_CLASSES)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(torch.tanh(self.first(features))), labels)


def train(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    """Train over all ranks and, on rank 0, alone. Collective.

    Returns:
        losses of both, the largest difference of losses and parameters, and seconds; the comparison on rank 0
        only.
    """
    torch.manual_seed(0)
    model, alone = _SmallModel(), _SmallModel()
    alone.load_state_dict(model.state_dict())
    features = torch.randn(_NUM_STEPS, size * _ROWS_PER_RANK, _NUM_FEATURES)
    labels = torch.randint(0, _NUM_CLASSES, (_NUM_STEPS, size * _ROWS_PER_RANK))
    own = slice(rank * _ROWS_PER_RANK, (rank + 1) * _ROWS_PER_RANK)
    begin = time.monotonic()
    model.to(device)
    compiled = torch.compile(model, backend="rannc", options=_options(device))
    losses, ends = _steps(compiled, model, features[:, own].to(device), labels[:, own].to(device))
    state = model.state_dict()
    answer: dict[str, Any] = {"num_ranks": size, "device": str(device), "losses": losses}
    answer |= {"first_seconds": ends[0] - begin, "step_seconds": (ends[-1] - ends[0]) / (_NUM_STEPS - 1)}
    if rank == 0:
        plain_losses, _ = _steps(alone, alone, features, labels)
        pairs = [(state[name].cpu(), value) for name, value in alone.state_dict().items()]
        differences = [float((found - value).abs().max()) for found, value in pairs]
        differences += [abs(found - value) for found, value in zip(losses, plain_losses, strict=True)]
        answer |= {"plain_losses": plain_losses, "difference": max(differences)}
    return answer


def _options(device: torch.device) -> dict[str, Any]:
    """Two stages, whatever they cost: nothing is measured beforehand, and a shipped description stands for
    the machine.
    """
    cluster = "v100-32gb" if device.type == "cuda" else "generic-cpu"
    return {"partition_num": 2, "costs": "rules", "cluster": cluster, "report_steps": 0}


def _steps(
    called: Any, model: nn.Module, features: torch.Tensor, labels: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Losses and times of the ends of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    losses, ends = [], []
    for rows, wanted in zip(features, labels, strict=True):
        optimizer.zero_grad()
        loss = called(rows, wanted)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        ends.append(time.monotonic())
    return losses, ends
