"""Plain models whose code goes over the rows of a batch by number, or keeps values of the batch, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS, WIDTH, CLASSES = 5, 12, 4


class _Net(nn.Module):
    def __init__(self, out: int = CLASSES) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, out))


class RowLoop(_Net):
    """Each sample by itself, in a loop over the batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = []
        for row in range(x.shape[0]):
            outputs.append(self.net(x[row]))
        return functional.cross_entropy(torch.stack(outputs), y)


class DetectionLoop(_Net):
    """A focal loss image by image, as detectors have it: each divided by its number of objects."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chances, losses = torch.sigmoid(self.net(x)), []
        for row in range(chances.shape[0]):
            found = torch.clamp(chances[row], 1e-4, 1 - 1e-4)
            target = functional.one_hot(labels[row], CLASSES).to(found.dtype)
            share = torch.where(torch.eq(target, 1.0), 0.25, 0.75)
            weight = share * torch.where(torch.eq(target, 1.0), 1 - found, found).pow(2)
            entropy = -(target * torch.log(found) + (1 - target) * torch.log(1 - found))
            count = (labels[row] > 0).sum().to(found.dtype)
            losses.append((weight * entropy).sum() / torch.clamp(count, min=1.0))
        return torch.stack(losses).mean(dim=0, keepdim=True).mean()


class SetMatching(_Net):
    """DETR: queries are matched with the objects of their image, in a loop over the images."""

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        found = self.net(x)
        rows, queries = found.shape[:2]
        with torch.no_grad():
            cost = torch.cdist(found.flatten(0, 1), boxes.flatten(0, 1), p=1).view(rows, queries, -1)
            parts = cost.split([boxes.shape[1]] * rows, -1)
            chosen = [part[row].argmin(0) for row, part in enumerate(parts)]
        batch = torch.cat([torch.full_like(query, row) for row, query in enumerate(chosen)])
        matched = found[batch, torch.cat(chosen)]
        return functional.l1_loss(matched, torch.cat(list(boxes)), reduction="sum") / (rows * boxes.shape[1])


class HardExamples(_Net):
    """Online hard example mining: the worst share of the batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(self.net(x), y, reduction="none")
        return losses.topk(int(0.6 * x.size(0)))[0].mean()


class LabeledHalf(_Net):
    """Semi-supervised: the first half of a batch has labels, the rest is to be certain."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found, half = self.net(x), x.shape[0] // 2
        certain = functional.softmax(found[half:], -1)
        entropy = -(certain * certain.log()).sum() / (x.shape[0] - half)
        return functional.cross_entropy(found[:half], y[:half]) + 0.1 * entropy


class CapsuleRouting(nn.Module):
    """Capsules that agree on their routing over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 3, CLASSES, 2, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        capsules = torch.stack([x.view(x.size(0), 3, 4)] * CLASSES, 2).unsqueeze(4)
        votes = torch.matmul(torch.cat([self.weight] * x.size(0), 0), capsules)
        routes = torch.zeros(1, 3, CLASSES, 1, dtype=x.dtype)
        for number in range(2):
            shares = torch.cat([functional.softmax(routes, 1)] * x.size(0), 0).unsqueeze(4)
            total = (shares * votes).sum(1, keepdim=True)
            squared = total.pow(2).sum(-2, keepdim=True)
            total = total * squared.sqrt() / (1 + squared)
            if number == 0:
                agreement = torch.matmul(votes.transpose(3, 4), torch.cat([total] * 3, 1))
                routes = routes + agreement.squeeze(4).mean(0, keepdim=True)
        return functional.cross_entropy(total.squeeze(1).squeeze(-1).norm(dim=-1), y)


class RunningLoss(_Net):
    """An average of the loss, kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torch.zeros(())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(self.net(x), y)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, WIDTH)


def _labels(*shape: int) -> torch.Tensor:
    return torch.randint(CLASSES, (ROWS, *shape))


ROW_MODELS: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Any]]]] = {
    "RowLoop": (RowLoop, lambda: {"x": _rows(), "y": _labels()}),
    "DetectionLoop": (DetectionLoop, lambda: {"x": _rows(7), "labels": _labels(7)}),
    "SetMatching": (SetMatching, lambda: {"x": _rows(7), "boxes": torch.randn(ROWS, 3, CLASSES)}),
    "HardExamples": (HardExamples, lambda: {"x": _rows(), "y": _labels()}),
    "LabeledHalf": (LabeledHalf, lambda: {"x": _rows(), "y": _labels()}),
    "CapsuleRouting": (CapsuleRouting, lambda: {"x": _rows(), "y": _labels()}),
    "RunningLoss": (RunningLoss, lambda: {"x": _rows(), "y": _labels()}),
}
