"""Parameters that have no value on any rank yet: each owner makes its own, once the plan says which those are.

In: a parameter and where its value will come from. Out: the parameter, absent (`absent_tensors.py`), which has its shape and no memory;
later, on the owners, the value. So no rank ever holds a whole model that is built on "meta".

Terms. A *source* makes values by name: from a file, from the modules' own ``reset_parameters``, or from what was recorded while the
model was built. Its *seed* decides what is random in them; all ranks use rank 0's, so replicas make the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.absent_tensors import make_absent, placeholder
from rannc_backend.runtime.world import World

Make = Callable[[str, torch.Tensor], torch.Tensor]


class Source(Protocol):
    """Makes values by name; the same on every rank for the same seed.

    Attributes:
        seed: what this rank would make them from.
        held: each rank has values of its own, as of a model that it has built; rank 0's count.
    """

    seed: int
    held: bool

    def value(self, name: str, seed: int) -> torch.Tensor:
        """The value of a parameter, on the CPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Where the value of one parameter comes from: a name in a source."""

    source: Source
    name: str


@dataclass(slots=True)
class Promises:
    """All promised parameters of this process; they end with their parameters."""

    _by_parameter: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def add(self, parameter: torch.Tensor, promise: Promise) -> None:
        """Promise a value for ``parameter``, in place of an earlier promise."""
        self._by_parameter[parameter] = promise

    def of(self, parameter: torch.Tensor) -> Promise | None:
        """The promise for a parameter; None when it has a value."""
        return self._by_parameter.get(parameter)

    def any_in(self, module: nn.Module) -> bool:
        """Whether some parameter of a module has no value yet."""
        return any(self.of(parameter) is not None for parameter in module.parameters())

    def parameters(self) -> list[torch.Tensor]:
        """All parameters that have no value yet."""
        return list(self._by_parameter)

    @contextmanager
    def fulfilling(self, root: nn.Module, world: World) -> Iterator[Make]:
        """Gives ``make(name, parameter)``; at the end no parameter of ``root`` is promised any more. Collective where any is."""
        mine = [(parameter, promise) for parameter in root.parameters() if (promise := self.of(parameter)) is not None]
        sources = list({id(promise.source): promise.source for _, promise in mine}.values())
        seeds: list[int] = [source.seed for source in sources]
        if sources:
            seeds = world.control.broadcast(seeds, what="seeds of parameters")
        seed_of = {id(source): seed for source, seed in zip(sources, seeds, strict=True)}

        def make(name: str, parameter: torch.Tensor) -> torch.Tensor:
            promise = self.of(parameter)
            assert promise is not None, f"{name} was not promised"
            value = promise.source.value(promise.name, seed_of[id(promise.source)])
            if value.shape != parameter.shape:
                raise UserInputError(
                    f"the value for parameter {name} has shape {list(value.shape)}, not {list(parameter.shape)}",
                    cure="give values of this model.",
                )
            return value

        yield make
        for parameter, _ in mine:
            del self._by_parameter[parameter]


def give_no_memory(parameter: nn.Parameter, name: str, device: torch.device) -> None:
    """Turn a parameter on "meta" into an absent one on ``device``; the object stays the same, optimizers keep it."""
    strides = parameter.stride()
    on_device = nn.Parameter(placeholder(parameter, device), requires_grad=parameter.requires_grad)
    # The data of a tensor on "meta" cannot be set to one with memory: the two objects change places.
    torch.utils.swap_tensors(parameter, on_device)
    make_absent(parameter, name, owners=(), device=device, strides=strides)
