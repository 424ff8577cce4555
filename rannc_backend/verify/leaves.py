"""The tensors in what a model takes and returns, whatever they are held in.

In: a value: tensors, lists, tuples, mappings, dataclasses and other plain objects, nested. Out: its tensors
in a fixed order with the way to each, or a copy in which they are others. What has no tensor in it stays the
very same object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Change = Callable[[str, Tensor], Any]
"""What takes the place of a tensor that is found at a path, as ``logits`` or ``[1].mask``."""


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Every tensor with its path; one that occurs twice is there twice."""
    found: list[tuple[str, Tensor]] = []

    def note(path: str, tensor: Tensor) -> Tensor:
        found.append((path, tensor))
        return tensor

    replaced(value, note)
    return found


def replaced(value: Any, change: Change, path: str = "", above: tuple[int, ...] = ()) -> Any:
    """The value with each tensor changed; ``above``: what it lies in."""
    if isinstance(value, Tensor):
        return change(path, value)
    if id(value) in above or isinstance(value, nn.Module | type) or callable(value):
        return value
    above = (*above, id(value))
    if isinstance(value, list | tuple):
        items = [replaced(item, change, f"{path}[{index}]", above) for index, item in enumerate(value)]
        return value if _same(items, value) else _sequence_like(value, items)
    if isinstance(value, Mapping):
        named = {key: replaced(item, change, _below(path, key), above) for key, item in value.items()}
        return value if _same(list(named.values()), list(value.values())) else _mapping_like(value, named)
    members = getattr(value, "__dict__", None)
    if not isinstance(members, dict):
        return value
    changed = {name: replaced(item, change, _below(path, name), above) for name, item in members.items()}
    if _same(list(changed.values()), list(members.values())):
        return value
    other = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(other, name, item)
    return other


def _same(items: list[Any], before: Any) -> bool:
    return all(item is old for item, old in zip(items, before, strict=True))


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _sequence_like(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _mapping_like(value: Mapping[Any, Any], named: dict[Any, Any]) -> Any:
    other: Any = copy.copy(value)
    for key, item in named.items():
        other[key] = item
    return other
