"""What a forward gives, taken apart into tensors and everything else, and put together again for each call.

In: a result: containers that torch knows, and objects of Python classes that hold tensors as attributes, as
transformers' caches of keys do. Out: its flat leaves, and a `Structure`. An object is made anew for each call, without
its constructor: its class and its attributes are what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rannc_backend.capture.nonstrict.reachable import file_of
from rannc_backend.capture.nonstrict.reads import Unknown
from rannc_backend.errors import UnsupportedModelError, is_of_user

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Structure:
    """How leaves become the result: containers, with objects in the places of some of their leaves."""

    containers: pytree.TreeSpec
    objects: Mapping[int, tuple[type, Structure]]  # by place: of the object's attributes
    num_leaves: int

    def rebuilt(self, leaves: Iterable[Any]) -> Any:
        """The result with these leaves, of which there are `num_leaves`."""
        remaining = iter(leaves)
        items: list[Any] = []
        for place in range(self.containers.num_leaves):
            if place not in self.objects:
                items.append(next(remaining))
                continue
            cls, attributes = self.objects[place]
            made: Any = object.__new__(cls)
            vars(made).update(attributes.rebuilt([next(remaining) for _ in range(attributes.num_leaves)]))
            items.append(made)
        return pytree.tree_unflatten(items, self.containers)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Of a result, by position: plain values, arguments that are given again (by index), numbers that are read of
    tensors (how many, and how to make the number of their values); and the outputs that a graph makes.
    """

    outputs: tuple[Any, ...]
    constants: dict[int, Any]
    passed: dict[int, int]
    numbers: dict[int, tuple[int, Callable[..., Any]]]


def sorted_leaves(
    leaves: Sequence[Any], arguments: Sequence[torch.Tensor], is_packed: Callable[[Any], bool]
) -> Leaves:
    """Raises UnsupportedModelError for a leaf that a graph cannot give."""
    index_of = {id(tensor): index for index, tensor in enumerate(arguments)}
    outputs: list[Any] = []
    found = Leaves((), {}, {}, {})
    for position, leaf in enumerate(leaves):
        if id(leaf) in index_of:
            found.passed[position] = index_of[id(leaf)]
        elif is_packed(leaf):
            raise UnsupportedModelError(
                "the forward gives a packed sequence, whose tokens have an order of the whole batch",
                cure="give the result of torch.nn.utils.rnn.pad_packed_sequence.",
            )
        elif isinstance(leaf, (torch.Tensor, torch.SymInt)):
            outputs.append(leaf)
        elif isinstance(leaf, Unknown) and (asked := leaf.given()):
            outputs += asked.tensors
            found.numbers[position] = len(asked.tensors), asked.form
        elif isinstance(leaf, _PLAIN):
            found.constants[position] = leaf
        else:
            what = (
                "number made of sizes"
                if isinstance(leaf, Unknown)
                else f"value of type {type(leaf).__name__}"
            )
            raise UnsupportedModelError(
                f"the forward gives a {what}, which is no tensor",
                cure="give tensors, and containers of tensors; register a class of your own with "
                "torch.utils._pytree.register_pytree_node.",
            )
    return replace(found, outputs=tuple(outputs))


def can_be_given(leaf: object) -> bool:
    """Whether later calls can give another value in the place of this one."""
    return isinstance(leaf, (torch.Tensor, torch.SymInt, Unknown, *_PLAIN))


def taken_apart(result: Any) -> tuple[list[Any], Structure]:
    """The leaves of a result in order, and how they were put together. An object that cannot be taken apart is a
    leaf.
    """
    return _apart(result, [])


def _apart(value: Any, outer: Sequence[object]) -> tuple[list[Any], Structure]:
    items, containers = pytree.tree_flatten(value)
    leaves: list[Any] = []
    objects: dict[int, tuple[type, Structure]] = {}
    for place, item in enumerate(items):
        if not _is_plain_object(item) or any(item is each for each in outer):
            leaves.append(item)
            continue
        inner, attributes = _apart(dict(vars(item)), [*outer, item])
        leaves += inner
        objects[place] = (type(item), attributes)
    return leaves, Structure(containers, objects, len(leaves))


def _is_plain_object(value: object) -> bool:
    """An object of a class written in Python whose attributes are all that it is."""
    cls = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.Tensor, nn.Module, type, Unknown))
        and not callable(value)
        and cls.__new__ is object.__new__
        and is_of_user(file_of(cls))
        and not any("__slots__" in vars(base) and vars(base)["__slots__"] for base in cls.__mro__)
    )
