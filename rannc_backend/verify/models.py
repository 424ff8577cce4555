"""The models behind what a script has compiled, made ready to be compared: the same way among the ranks and
in the reference.

In: the function that was compiled. Out: its modules with fewer layers, in float64, without random numbers, as
the settings say; and their tensors by name. All of it happens before the first call of a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rannc_backend.errors import UserInputError
from rannc_backend.errors.base import did_you_mean, nearest
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.verify.settings import ValueKind, VerifySettings

# Of nn.Dropout, nn.Dropout2d, nn.AlphaDropout and those that users derive from them.
_AnyDropout = nn.Dropout.__mro__[1]


def modules_behind(function: Callable[..., Any]) -> list[nn.Module]:
    """The module whose call this is; of a plain function those that it refers to by its own names and the
    global ones.
    """
    link: Any = function
    while link is not None:
        owner = getattr(link, "__self__", None)
        if isinstance(owner, nn.Module):
            return [owner]
        if owner is not None:
            return _modules_in(vars(owner).values() if hasattr(owner, "__dict__") else ())
        inner = getattr(link, "__wrapped__", None)
        if inner is None:
            break
        link = inner
    try:
        names = inspect.getclosurevars(link)
    except TypeError:
        return _modules_in(vars(function).values() if hasattr(function, "__dict__") else ())
    return _modules_in([*names.nonlocals.values(), *names.globals.values()])


def _modules_in(values: Any) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    for value in values:
        if isinstance(value, nn.Module):
            found.setdefault(id(root_of(value)), root_of(value))
    return list(found.values())


@dataclass(slots=True)
class Models:
    """All modules behind compiled functions, in the order in which they were first called."""

    settings: VerifySettings
    modules: list[nn.Module] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)  # lists of layers, by path

    def see(self, function: Callable[..., Any]) -> list[int]:
        """Make the modules of a call ready; gives the numbers of those that are new.

        Raises:
            UserInputError: there are none, they have no values, or have no layers of the names in the
            settings.
        """
        behind = modules_behind(function)
        if not any(True for module in behind for _ in module.parameters()):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise UserInputError(
                f"what the script compiles, {name}, has no parameters that `rannc verify` can find",
                cure="compile the model itself, or a function that refers to it by a name of its own.",
            )
        new = [module for module in behind if not any(module is known for known in self.modules)]
        self._cut(new)
        numbers = []
        for module in new:
            numbers.append(len(self.modules))
            self.modules.append(module)
            self._prepare(module)
        for module in behind:
            if self.settings.evaluation:
                module.eval()
        return numbers

    def _cut(self, new: Sequence[nn.Module]) -> None:
        for path, number in self.settings.layers.items() if new else ():
            having = [module for module in new if path in lists_of(module)] or (
                [] if path in self.cut else [new[0]]
            )
            for module in having:
                keep_layers(module, path, number)
            self.cut.add(path)

    def _prepare(self, module: nn.Module) -> None:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise UserInputError(
                f"parameters of {type(module).__name__} have no values before its first call",
                cure="verify a smaller model of the same kind that is built with its values (not on the meta "
                "device).",
            )
        if self.settings.dtype == "float64":
            module.double()
        for part in module.modules():
            if isinstance(part, _AnyDropout) and part.p:
                part.p = 0.0  # type: ignore[assignment]
                self.notes.add(
                    "dropout is 0 on both sides: the backend draws other random numbers than plain torch"
                )
        if self.settings.evaluation:
            self.notes.add("the models are in evaluation mode on both sides")

    def tensors(self) -> Iterator[tuple[ValueKind, str, Tensor]]:
        """("parameter" or "buffer", name, tensor) of all that have values here; tied ones once."""
        seen: set[int] = set()
        for number, module in enumerate(self.modules):
            prefix = f"{type(module).__name__} {number + 1}: " if len(self.modules) > 1 else ""
            groups: tuple[tuple[ValueKind, Iterator[tuple[str, Tensor]]], ...] = (
                ("parameter", module.named_parameters()),
                ("buffer", module.named_buffers()),
            )
            for kind, named in groups:
                for name, tensor in named:
                    if id(tensor) not in seen and not is_absent(tensor):
                        seen.add(id(tensor))
                        yield kind, prefix + name, tensor

    def parameters(self) -> dict[str, Tensor]:
        """Those that have values here, by name."""
        return {name: tensor for kind, name, tensor in self.tensors() if kind == "parameter"}

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has a parameter of these models."""
        known = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return any(
            id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]
        )

    def cast(self, tensor: Tensor) -> Tensor:
        """An input as the models want it."""
        return tensor.double() if self.settings.dtype == "float64" and tensor.is_floating_point() else tensor


def lists_of(module: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """The lists of layers in a module, by path."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    }


def keep_layers(module: nn.Module, path: str, number: int) -> None:
    """Cut a list of modules down to its first ones.

    Raises:
        UserInputError: there is no list of that name, or it has fewer.
    """
    lists = lists_of(module)
    found = lists.get(path)
    if found is None:
        near = did_you_mean(nearest(path, lists)) or (
            f"it has {', '.join(list(lists)[:3])}. " if lists else ""
        )
        problem = f"{type(module).__name__} has no list of layers {path!r}"
        raise UserInputError(problem, cure=f"{near}Names are as model.named_modules() gives them.")
    if not 1 <= number <= len(found):
        raise UserInputError(
            f"{path!r} has {len(found)} layers, and {number} were to be kept", cure=f"give 1 to {len(found)}."
        )
    del found[number:]
