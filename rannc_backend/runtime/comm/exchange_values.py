"""Nests of tensors and plain values from rank to rank, as an optimizer keeps them for each parameter.

In: entries, each on one rank, and the ranks that want them. Out: the entries there, on the CPU. Terms: a
nest's *form* is JSON: its structure, its plain values, and shape and dtype of each tensor. No code travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.parameters import STATE_CHANNEL
from rannc_backend.runtime.world import Ranks, World

_PLAIN = (bool, int, float, str, type(None))


def exchange(
    world: World, entries: Sequence[Any], sources: Sequence[int], takers: Sequence[Ranks]
) -> list[Any]:
    """``entries`` with those that this rank takes from others filled in, on the CPU; an entry without a value
    stays None. Collective.

    Args:
        entries: this rank's own.
        sources: the rank that has each entry.
        takers: the ranks that want each entry.
    """
    result = list(entries)
    wanted = [i for i in range(len(result)) if any(taker != sources[i] for taker in takers[i])]
    coded: dict[int, Coded] = {
        i: Coded.of(entries[i]) for i in wanted if sources[i] == world.rank and entries[i] is not None
    }
    shapes = {
        i: form
        for answer in agree(world, "forms of optimizer state", [[i, c.form] for i, c in coded.items()])
        for i, form in answer
    }
    with exchanging(world):
        for i in wanted:
            if i not in shapes:
                continue
            if sources[i] == world.rank:
                _send(world, coded[i].tensors, [taker for taker in takers[i] if taker != world.rank])
            elif world.rank in takers[i]:
                result[i] = value_of_form(
                    shapes[i], iter(_receive(world, tensors_of_form(shapes[i]), sources[i]))
                )
    return result


def _send(world: World, tensors: Sequence[torch.Tensor], takers: Sequence[int]) -> None:
    for tensor in tensors:
        data = plain_memory(tensor.detach().to(world.device))
        for work in [world.transport.isend(data, taker, STATE_CHANNEL) for taker in takers]:
            work.wait()


def _receive(world: World, forms: Iterator[tuple[list[int], torch.dtype]], source: int) -> list[torch.Tensor]:
    tensors = []
    for shape, dtype in forms:
        buffer = torch.empty(shape, dtype=dtype, device=world.device)
        world.transport.irecv(buffer, source, STATE_CHANNEL).wait()
        tensors.append(buffer.cpu())
    return tensors


@dataclass(slots=True)
class Coded:
    """A nest as JSON, its *form*, with the tensors beside it in order."""

    form: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Coded:
        """UserInputError for what is neither a tensor, a plain value, nor a list, tuple or dict of such."""
        coded = cls()
        coded.form = coded._code(value)
        return coded

    def _code(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, dict):
            return ["dict", [[self._code(key), self._code(member)] for key, member in value.items()]]
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", [self._code(member) for member in value]]
        if isinstance(value, _PLAIN):
            # As text, so that infinities and all digits of a float arrive.
            return ["plain", repr(value) if isinstance(value, float) else value, type(value).__name__]
        raise UserInputError(
            f"the optimizer keeps a {type(value).__name__}, which cannot be sent to another rank",
            cure="use an optimizer whose state is tensors and numbers.",
        )


def tensors_of_form(form: Any) -> Iterator[tuple[list[int], torch.dtype]]:
    """Shape and dtype of each tensor of a form, in order."""
    kind, content = form[0], form[1]
    if kind == "tensor":
        yield content, getattr(torch, form[2])
    elif kind == "dict":
        for key, member in content:
            yield from tensors_of_form(key)
            yield from tensors_of_form(member)
    elif kind in ("list", "tuple"):
        for member in content:
            yield from tensors_of_form(member)


def value_of_form(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The nest of a form and its tensors."""
    kind, content = form[0], form[1]
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {value_of_form(key, tensors): value_of_form(member, tensors) for key, member in content}
    if kind in ("list", "tuple"):
        members = [value_of_form(member, tensors) for member in content]
        return members if kind == "list" else tuple(members)
    return float(content) if form[2] == "float" else content
