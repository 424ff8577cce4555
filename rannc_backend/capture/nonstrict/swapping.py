"""Other tensors in all places where the modules of a model hold theirs, for a while.

In: a module and which tensor takes whose place. Out: a stretch in which they are there, after which all is as
before; and what the code that ran meanwhile has put in their places itself, or in attributes that it never reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from rannc_backend.capture.nonstrict.outputs import can_be_given, taken_apart
from rannc_backend.capture.nonstrict.reachable import names_in_library_code, names_set_by
from rannc_backend.capture.nonstrict.reads import Unknown
from rannc_backend.errors import UnsupportedModelError

_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """An entry of a dictionary or a list."""

    holder: Any
    key: Any
    name: str
    is_buffer: bool

    def get(self) -> Any:
        """What is there; None if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return None


@dataclass(frozen=True, slots=True)
class Replaced:
    """A place in which the code has put something else."""

    slot: Slot
    before: torch.Tensor  # that was put in there for the stretch
    now: Any


Attributes = tuple[tuple[dict[str, Any], str, str], ...]
"""Dictionary, key and what it is called."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a forward has put into an attribute of a module."""

    holder: dict[str, Any]
    key: str
    name: str  # "the model.kept"
    value: Any


class AttributeReadError(UnsupportedModelError):
    """An attribute has no value where it is read."""


class _UnknownAttribute:
    """In the place of the value of an attribute that no code should read."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AttributeReadError(
            "the model reads an attribute that is set by a module that runs as written, or by a name that it makes while it runs",
            cure="let the module give the value as a result, or make it a buffer (self.register_buffer).",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copies, and what prints a model
        self._refuse()

    def __repr__(self) -> str:
        return "<set on the ranks that run this module>"

    __bool__ = __eq__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


_UNKNOWN = _UnknownAttribute()


@dataclass(frozen=True, slots=True)
class Swap:
    """The places, with what was put there."""

    placed: tuple[tuple[Slot, torch.Tensor], ...]
    unread: Attributes  # see `attributes_of`

    def replaced(self) -> list[Replaced]:
        """To be asked within the stretch: places whose tensor is not there any more."""
        return [
            Replaced(slot, tensor, slot.get()) for slot, tensor in self.placed if slot.get() is not tensor
        ]

    def written(self) -> tuple[Written, ...]:
        """To be asked within the stretch: what the code has put into attributes that it does not read."""
        return tuple(
            Written(holder, key, name, holder[key])
            for holder, key, name in self.unread
            if not isinstance(holder.get(key, _UNKNOWN), _UnknownAttribute)
        )


@contextmanager
def swapped(
    module: nn.Module, others: Mapping[int, torch.Tensor], unread: Set[str] = frozenset()
) -> Iterator[Swap]:
    """`others`: by the id of the tensor that is there; ``unread``: names of attributes that the code writes and does not
    read, which have no value at the beginning.
    """
    attributes = attributes_of(module, unread)
    unread_keys = {(id(holder), key) for holder, key, _ in attributes}
    slots = [
        slot
        for slot in _slots(module)
        if id(slot.get()) in others and (id(slot.holder), slot.key) not in unread_keys
    ]
    before = [slot.get() for slot in slots]
    placed = tuple((slot, others[id(tensor)]) for slot, tensor in zip(slots, before, strict=True))
    give_back = _remembered(attributes)
    try:
        for slot, tensor in placed:
            slot.holder[slot.key] = tensor
        hide(tuple(each for each in attributes if each[1] in each[0]))
        yield Swap(placed, attributes)
    finally:
        give_back()
        for slot, tensor in zip(slots, before, strict=True):
            slot.holder[slot.key] = tensor


def _slots(module: nn.Module) -> Iterator[Slot]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for holder, is_buffer in ((part._parameters, False), (part._buffers, True)):
            for key in holder:
                yield Slot(holder, key, f"{prefix}{key}", is_buffer)
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                yield from _inside(vars(part), key, value, f"{prefix}{key}", _MAX_DEPTH)


def _inside(holder: Any, key: Any, value: object, name: str, depth: int) -> Iterator[Slot]:
    if isinstance(value, torch.Tensor):
        yield Slot(holder, key, name, is_buffer=False)
    elif depth and isinstance(value, list | dict):
        for inner_key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(value, inner_key, inner, f"{name}[{inner_key!r}]", depth - 1)


def attributes_of(module: nn.Module, names: Set[str]) -> Attributes:
    """Where the modules of a model have, or may have, attributes of these names. None that code of torch's own may read."""
    return tuple(
        (vars(part), name, f"{path or 'the model'}.{name}")
        for path, part in (module.named_modules() if names else ())
        for name in sorted(names - names_in_library_code(part.__class__))
    )


def attributes_set_by(module: nn.Module, path: str) -> Attributes:
    """Plain attributes of a module and those in it that methods of their classes set."""
    return tuple(
        (vars(part), name, ".".join(filter(None, (path, inner, name))))
        for inner, part in module.named_modules()
        for name in sorted(names_set_by(part.__class__) & vars(part).keys())
        if not isinstance(vars(part)[name], torch.Tensor)
    )


@contextmanager
def noting_writes(
    module: nn.Module, path: str, unknown: Attributes
) -> Iterator[Callable[[], tuple[Written, ...]]]:
    """A stretch in which the `unknown` attributes have no value, and after which all of a module's are as before; what it
    yields gives those that were written.
    """
    before = [(inner, vars(part), dict(vars(part))) for inner, part in module.named_modules()]
    found: list[Written] = []
    taken = {(id(holder), key) for holder, key, _ in unknown}
    hide(unknown)
    try:
        yield lambda: tuple(found)
    finally:
        for inner, holder, values in before:
            for key, value in list(holder.items()):
                was = _UNKNOWN if (id(holder), key) in taken else values.get(key, _UNKNOWN)
                if value is not was and not all(isinstance(each, torch.Tensor) for each in (was, value)):
                    found.append(Written(holder, key, ".".join(filter(None, (path, inner, key))), value))
            for key in holder.keys() - values.keys():
                del holder[key]
            holder.update(values)


def hide(attributes: Attributes) -> Callable[[], None]:
    """Take their values away; returns what gives them back."""
    give_back = _remembered(attributes)
    for holder, key, _ in attributes:
        holder[key] = _UNKNOWN
    return give_back


def _remembered(attributes: Attributes) -> Callable[[], None]:
    """What gives them the values that they have now, or none."""
    before = [(holder, key, holder.get(key, _UNKNOWN)) for holder, key, _ in attributes]

    def give_back() -> None:
        for holder, key, value in before:
            holder[key] = value
            if value is _UNKNOWN:
                del holder[key]

    return give_back


def values_of(
    written: Sequence[Written], own: Iterable[torch.Tensor], kept_modules: Iterable[str]
) -> list[Any]:
    """What later calls put there too. ``own``: tensors of the model in this run.

    Raises UnsupportedModelError for what they cannot make: objects, tensors of the model itself, what `kept_modules` do.
    """
    ids = {id(tensor) for tensor in own}
    for attribute in written:
        leaves, _ = taken_apart(attribute.value)
        if any(kept_modules) or not all(can_be_given(leaf) and id(leaf) not in ids for leaf in leaves):
            raise changed_error(attribute.name, attribute.value)
    return [attribute.value for attribute in written]


def changed_error(name: str, value: object) -> UnsupportedModelError:
    """The forward has changed what a graph has no place for."""
    is_number = isinstance(value, Unknown)
    return UnsupportedModelError(
        f"the forward changes {name} ({'a number' if is_number else type(value).__name__}), which a graph does not",
        cure="keep the tensor there (value.detach()) and read it with .item() after the call, or give it as an output."
        if is_number
        else "make it a buffer (self.register_buffer), give it as an output, or change it outside of the "
        "compiled model.",
    )


def write_back(replaced: Sequence[Replaced], results: Iterable[object]) -> None:
    """A buffer that the forward has replaced by another tensor gets its values; so does a parameter whose old and
    new tensor have no part in the gradients of `results`. Nothing else may be replaced.

    A parameter without a gradient is one that no optimizer changes, so that it does not matter which of the two
    tensors the optimizer knows.
    """
    for entry in replaced:
        now, before = entry.now, entry.before
        is_new_value = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (
            before.shape,
            before.dtype,
        )
        if is_new_value and not entry.slot.is_buffer and _reach(results, (before, now)):
            raise UnsupportedModelError(
                f"the forward puts a new parameter in place of {entry.slot.name}, which is trained: the optimizer "
                "would go on with the old one",
                cure="change its values under torch.no_grad() (self.name.copy_(new)), or use it detached.",
            )
        if not is_new_value:
            raise UnsupportedModelError(
                f"the forward puts another value in place of {entry.slot.name}",
                cure="change the values of a buffer (self.name.copy_(new)), and keep its shape.",
            )
        with torch.no_grad():
            before.copy_(now)


def _reach(results: Iterable[object], leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the gradient of any of the results goes to any of the leaves."""
    nodes = {get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad}
    tensors = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    to_visit = [get_gradient_edge(tensor).node for tensor in tensors]
    seen = set(to_visit)
    while to_visit:
        node = to_visit.pop()
        if node in nodes:
            return True
        found = {previous for previous, _ in node.next_functions if previous is not None} - seen
        seen |= found
        to_visit += found
    return False
