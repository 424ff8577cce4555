"""Parameters that have no value on any rank yet: each owner makes its own, once the plan says which those
are.

In: a parameter and where its value will come from. Out: the parameter, absent (`absent_tensors.py`), which
has its shape and no memory; later, on the owners, the value. So no rank ever holds a whole model that is
built on "meta".

Terms. A *source* makes values by name: from a file, from the modules' own ``reset_parameters``, or from what
was recorded while the model was built. Its *seed* decides what is random in them; all ranks use rank 0's, so
replicas make the same.
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
class DeferredValue:
    """Where the value of one parameter comes from: a name in a source."""

    source: Source
    name: str


@dataclass(slots=True)
class DeferredValues:
    """All parameters with deferred values of this process; they end with their parameters."""

    _by_parameter: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def add(self, parameter: torch.Tensor, deferred_value: DeferredValue) -> None:
        """Defer the value of ``parameter``, in place of an earlier one."""
        self._by_parameter[parameter] = deferred_value

    def of(self, parameter: torch.Tensor) -> DeferredValue | None:
        """The deferred value of a parameter; None when it has a value."""
        return self._by_parameter.get(parameter)

    def any_in(self, module: nn.Module) -> bool:
        """Whether some parameter of a module has no value yet."""
        return any(self.of(parameter) is not None for parameter in module.parameters())

    def parameters(self) -> list[torch.Tensor]:
        """All parameters that have no value yet."""
        return list(self._by_parameter)

    @contextmanager
    def materializing(self, root: nn.Module, world: World) -> Iterator[Make]:
        """Gives ``make(name, parameter)``; at the end no parameter of ``root`` has a deferred value any more.
        Collective where any is.
        """
        mine = [
            (parameter, deferred_value)
            for parameter in root.parameters()
            if (deferred_value := self.of(parameter)) is not None
        ]
        sources = list(
            {id(deferred_value.source): deferred_value.source for _, deferred_value in mine}.values()
        )
        seeds: list[int] = [source.seed for source in sources]
        if sources:
            seeds = world.control.broadcast(seeds, what="seeds of parameters")
        seed_of = {id(source): seed for source, seed in zip(sources, seeds, strict=True)}

        def make(name: str, parameter: torch.Tensor) -> torch.Tensor:
            deferred_value = self.of(parameter)
            assert deferred_value is not None, f"{name} has no deferred value"
            value = deferred_value.source.value(deferred_value.name, seed_of[id(deferred_value.source)])
            if value.shape != parameter.shape:
                raise UserInputError(
                    f"the value for parameter {name} has shape {list(value.shape)}, not "
                    f"{list(parameter.shape)}",
                    cure="give values of this model.",
                )
            return value

        yield make
        for parameter, _ in mine:
            del self._by_parameter[parameter]


def give_no_memory(parameter: nn.Parameter, name: str, device: torch.device) -> None:
    """Turn a parameter on "meta" into an absent one on ``device``; the object stays the same, optimizers keep
    it.
    """
    strides = parameter.stride()
    on_device = nn.Parameter(placeholder(parameter, device), requires_grad=parameter.requires_grad)
    # The data of a tensor on "meta" cannot be set to one with memory: the two objects change places.
    torch.utils.swap_tensors(parameter, on_device)
    make_absent(parameter, name, owners=(), device=device, strides=strides)
