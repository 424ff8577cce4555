"""What the hooks of ``state_dict`` and ``load_state_dict`` are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rannc_backend.runtime.world import Ranks, World


class StateHook:
    """A hook of one module, for torch.nn.Module: copies of the module, also by way of a file, have one that
    does nothing.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHook:
        return StateHook(do_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateHook, (do_nothing,)


def do_nothing(*args: Any) -> None:
    return


def all_names(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]


def complete(root: nn.Module, owners: Mapping[str, Ranks], world: World) -> dict[str, Ranks]:
    everyone = tuple(range(world.size))
    found = [*root.named_parameters(), *root.named_buffers()]
    # Dynamo looks at the values of floating-point scalars, wherever they are.
    alike = {
        name
        for name, tensor in found
        if tensor.dim() == 0 and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    }
    return {name: everyone if name in alike else tuple(owners.get(name, everyone)) for name, _ in found}


def no_value(name: str, tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"nobody has a value for {name}")


def size_in_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
