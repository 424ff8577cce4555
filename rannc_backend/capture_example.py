"""Puts a model and the arguments of one call on another device, or gives them another dtype, before they are captured.

In: a model, nested arguments. Out: the same with other tensors; None as device or dtype leaves that as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def convert_model(model: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Give the model's tensors, in place, another device, and its floating-point ones another dtype; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            other = convert_values(tensor.detach(), device, dtype)
            if isinstance(tensor, nn.Parameter):
                other = nn.Parameter(other, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor if other.device == tensor.device and other.dtype == tensor.dtype else other
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = converted(tensor)


def convert_values(values: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Nested arguments with their tensors on another device, floating-point ones with another dtype."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, convert, values)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
