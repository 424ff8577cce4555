"""Models of timm and torchvision as they are registered, three classes, on small images where they take any.

torchvision's compiled operators are missing where it was built for another torch than the one installed; its
models import without them once the two operators that its own declarations name exist (`import_torchvision`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS, CLASSES = 5, 3
_KINDS = ("torchvision.models", "torchvision.models.segmentation", "torchvision.models.video")


@functools.cache
def import_torchvision() -> Any:
    """The module, also where its compiled operators do not load."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision, library


class Classified(nn.Module):
    """A model of images with its loss; of several outputs (auxiliary heads) all count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy."""
        found = self.model(images)
        if isinstance(found, dict):
            found = list(found.values())
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        losses = [functional.cross_entropy(output, labels) for output in outputs]
        return torch.stack(losses).sum()


def smallest_of_timm(most_parameters: int) -> list[str]:
    """Of each module of timm the model with the fewest parameters."""
    import_torchvision()
    import timm

    groups = [timm.list_models(module=module) for module in timm.list_modules()]
    return _smallest(groups, timm.create_model, most_parameters)


def smallest_of_torchvision(most_parameters: int) -> list[str]:
    """Of each module of torchvision with classifiers, segmenters or video models the smallest model."""
    torchvision, _ = import_torchvision()
    groups: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__
        if module.rpartition(".")[0] in _KINDS:
            groups.setdefault(module, []).append(name)
    return _smallest(
        groups.values(),
        lambda name: (
            torchvision.models.get_model(name, weights=None, weights_backbone=None)
            if "segmentation" in torchvision.models.get_model_builder(name).__module__
            else torchvision.models.get_model(name, weights=None)
        ),
        most_parameters,
    )


def _smallest(
    groups: Iterable[list[str]], make: Callable[[str], nn.Module], most_parameters: int
) -> list[str]:
    chosen = []
    for names in groups:
        sizes = {}
        for name in names:
            with contextlib.suppress(Exception), torch.device("meta"):  # some need extra packages
                sizes[name] = sum(parameter.numel() for parameter in make(name).parameters())
        fitting = [name for name in sizes if sizes[name] <= most_parameters]
        if fitting:
            chosen.append(min(fitting, key=lambda name: (sizes[name], name)))
    return chosen


def make_timm(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of timm and a batch."""
    import_torchvision()
    import timm

    model = timm.create_model(name, num_classes=CLASSES)
    settings = model.default_cfg
    size = settings["input_size"][-1]
    if not settings.get("fixed_input_size"):
        size = min(size, 96)
    return Classified(model).train(), {
        "images": torch.randn(ROWS, 3, size, size),
        "labels": torch.randint(CLASSES, (ROWS,)),
    }


def make_torchvision(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of torchvision and a batch."""
    torchvision, _ = import_torchvision()
    builder = torchvision.models.get_model_builder(name)
    labels = torch.randint(CLASSES, (ROWS,))
    if "segmentation" in builder.__module__:
        model = builder(weights=None, weights_backbone=None, num_classes=CLASSES)
        images = torch.randn(ROWS, 3, 64, 64)
        labels = torch.randint(CLASSES, (ROWS, 64, 64))
    elif "video" in builder.__module__:
        model = builder(weights=None, num_classes=CLASSES)
        frames, size = (16, 224) if "mvit" in name else (14, 64)
        images = torch.randn(ROWS, 3, frames, size, size)
    else:
        model = builder(weights=None, num_classes=CLASSES)
        fixed = any(part in name for part in ("vit", "alexnet", "inception", "vgg"))
        size = 299 if "inception" in name else 224 if fixed else 64
        images = torch.randn(ROWS, 3, size, size)
    return Classified(model).train(), {"images": images, "labels": labels}
