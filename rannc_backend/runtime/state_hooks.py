"""What the hooks of ``state_dict``, ``load_state_dict`` and ``save_pretrained`` are made of."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.runtime.agreement import agree, failing_together
from rannc_backend.runtime.world import Ranks, World
from rannc_backend.settings import hooks


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


class SavedByZero:
    """`save_pretrained` of one module: all ranks call it, and rank 0, which gets the state, writes.

    Every rank would take itself for the one that writes: those without a state would write nothing, and remove
    rank 0's files as left over from an earlier save. A rank that is given a ``state_dict`` writes it. Copies of
    the module, also by way of a file, save as the library does.
    """

    def __init__(self, module: nn.Module, world: World | None) -> None:
        self._module, self._world = weakref.ref(module), world

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, world = self._module(), self._world
        assert module is not None, "the module is gone"
        save: Any = type(module).save_pretrained
        if world is None or kwargs.get("state_dict"):
            return save(module, *args, **kwargs)
        signature = inspect.signature(save)
        if "is_main_process" not in signature.parameters:
            raise UnsupportedModelError(
                f"save_pretrained of {type(module).__name__} does not let one rank write for all",
                cure="call rannc_backend.save_pretrained(model, directory) on all ranks.",
            )
        bound = signature.bind(module, *args, **kwargs)
        if bound.arguments.get("state_dict"):
            return save(module, *args, **kwargs)
        bound.arguments["is_main_process"] = world.rank == 0 and bound.arguments.get("is_main_process", True)
        with failing_together(world, "save_pretrained"):
            result = save(*bound.args, **bound.kwargs)
        # Files are there for every rank when it returns.
        agree(world, "the end of save_pretrained")
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedByZero, (self._module(), None)


def install_hooks(
    root: nn.Module, after_state_dict: Callable[..., None], before_load: Callable[..., None], world: World
) -> list[hooks.Undo]:
    """The hooks of all modules of a model; what ends each of them."""
    undo = []
    for module in root.modules():
        if module._parameters or module._buffers:
            for register, hook in (
                (module.register_state_dict_post_hook, StateHook(after_state_dict)),
                (module.register_load_state_dict_pre_hook, StateHook(before_load)),
            ):
                undo.append(hooks.register("module states", register, hook))
        if callable(getattr(type(module), "save_pretrained", None)):
            undo.append(hooks.replace("module states", module, "save_pretrained", SavedByZero(module, world)))
    return undo


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
