"""What a capture holds for: the values that the forward may read beside its tensors.

In: a module, before its forward runs on fakes. Out: `Guards`: values of attributes of all modules (and of the
objects, lists and dictionaries in them), of globals and of closure cells, and torch's own modes. After the
run they show what the forward has changed; later, whether the capture still holds. Values deeper than
`_MAX_DEPTH` objects, files, and what extensions in C read cannot be seen. Clocks and the generators of Python and
NumPy give other values each time: reading them is refused.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rannc_backend.capture.nonstrict.reachable import Reachable, file_of
from rannc_backend.capture.nonstrict.swapping import Attributes, attributes_of
from rannc_backend.errors import UnsupportedModelError, is_of_user, user_location

_MAX_DEPTH = 4
_PACKAGE = f"{__name__.partition('.')[0]}."
_MAX_GLOBAL_ITEMS = 256
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
_OPAQUE = (
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, nn.Module, torch.Tensor),
    logging.Logger,  # what it has said before
)
_PLAIN_SIZE = type("_Plain", (), {}).__basicsize__  # of objects that have nothing but their attributes
_MISSING = object()
_ALL = object()  # the key of all items of a list that has become longer or shorter


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is not what it was."""

    place: str
    holder: Any
    key: Any
    before: Any
    now: Any
    is_of_torch: bool = (
        False  # an attribute of a layer of torch's own, which keeps what it has worked out there
    )

    def undo(self) -> None:
        """Put back what was there."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = self.before
        elif self.key is _ALL:
            self.holder[:] = self.before
        elif self.before is _MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = self.before


@dataclass(slots=True)
class _Container:
    """A dictionary or a list, with what was in it."""

    place: str
    holder: Any
    is_of_torch: bool
    are_members: bool = False  # attributes of an object
    skipped: frozenset[str] = frozenset()  # keys that hold whatever the forward has put there
    known: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.known = self.items()

    def items(self) -> dict[Any, Any]:
        """What is in it now."""
        items = _items(self.holder)
        return {key: items[key] for key in items.keys() - self.skipped} if self.skipped else items

    def changes(self) -> Iterator[Change]:
        current = self.items()
        if isinstance(self.holder, list) and len(current) != len(self.known):
            before, now = ([*items.values()] for items in (self.known, current))
            yield Change(self.place, self.holder, _ALL, before, now, self.is_of_torch)
            return
        for key in [*self.known, *(key for key in current if key not in self.known)]:
            before, after = self.known.get(key, _MISSING), current.get(key, _MISSING)
            if not _same(before, after):
                place = f"{self.place}.{key}" if self.are_members else f"{self.place}[{key!r}]"
                yield Change(place, self.holder, key, before, after, self.is_of_torch)


def _items(holder: Any) -> dict[Any, Any]:
    # A subclass may make a value of each item that is asked for.
    return dict(dict.items(holder)) if isinstance(holder, dict) else dict(enumerate(holder))


@dataclass(slots=True)
class Guards:
    """See the module docstring."""

    containers: list[_Container] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    cells: list[tuple[str, CellType, Any]] = field(default_factory=list)
    modes: tuple[Any, ...] = ()
    unread: frozenset[str] = frozenset()
    skipped: Attributes = ()
    written: Callable[[Set[str]], frozenset[str]] = frozenset  # see `Reachable`
    only_written: Callable[[Set[str]], frozenset[str]] = frozenset
    _reads: list[Callable[[], Iterable[object]]] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, unread: frozenset[str] = frozenset()) -> Guards:
        """Of the values now, but for attributes that are `unread` by their names; see `attributes_of`."""
        guards, seen = cls(modes=_modes(), unread=unread), set[int]()
        skipped = {id(holder) for holder, _, _ in attributes_of(module, unread)}
        for path, part in module.named_modules():
            of_torch = not is_of_user(file_of(type(part)))
            without = unread if id(vars(part)) in skipped else frozenset()
            guards._visit_members(path or "the model", part, seen, _MAX_DEPTH, of_torch, without)
        reachable = Reachable(module)
        guards.written, guards.only_written = reachable.written, reachable.only_written
        for holder, name in reachable.names.values():
            value = holder.get(name, _MISSING)
            guards.names.append((holder, name, value))
            guards._visit_global(f"{holder.get('__name__', '')}.{name}", value, seen)
        for place, cell in reachable.cells.values():
            guards.cells.append((place, cell, cell.cell_contents))
            guards._visit_global(place, cell.cell_contents, seen)
        guards._reads = list(guards._readers())
        guards._ids = guards._ids_now()
        return guards

    def without(self, attributes: Attributes) -> Guards:
        """From now on not of these, which modules that run as written set, and that no other code reads."""
        if not attributes:
            return self
        keys: dict[int, set[str]] = {}
        for holder, key, _ in attributes:
            keys.setdefault(id(holder), set()).add(key)
        for each in self.containers:
            if each.are_members and id(each.holder) in keys:
                each.skipped |= keys[id(each.holder)]
                each.known = {key: value for key, value in each.known.items() if key not in each.skipped}
        self.skipped = attributes
        self._reads = list(self._readers())
        self._ids = self._ids_now()
        return self

    def _readers(self) -> Iterator[Callable[[], Iterable[object]]]:
        """What gives all values, in the same order each time, without a step of Python for each."""
        dicts = [
            each.holder for each in self.containers if isinstance(each.holder, dict) and not each.skipped
        ]
        others = [each.holder for each in self.containers if not isinstance(each.holder, dict)]
        partly = [each for each in self.containers if each.skipped]
        yield lambda: chain.from_iterable(each.items().values() for each in partly)
        yield lambda: chain.from_iterable(map(dict.values, dicts))
        yield lambda: chain.from_iterable(others)
        yield lambda: [cell.cell_contents for _, cell, _ in self.cells]
        by_holder: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for holder, name, value in self.names:
            if value is not _MISSING:
                by_holder.setdefault(id(holder), (holder, []))[1].append(name)
        for holder, names in by_holder.values():
            # Twice the last: one name alone would be given without a tuple.
            yield partial(itemgetter(*names, names[-1]), holder)

    def _ids_now(self) -> list[int]:
        return [each for read in self._reads for each in map(id, read())]

    def changes(self) -> Iterator[Change]:
        """Every value that is another one now."""
        if (modes := _modes()) != self.modes:
            yield Change("a mode of torch", {}, "", self.modes, modes)
        for container in self.containers:
            yield from container.changes()
        for holder, name, value in self.names:
            if (now := holder.get(name, _MISSING)) is not value and not _same(value, now):
                yield Change(f"{holder.get('__name__', '')}.{name}", holder, name, value, now)
        for place, cell, value in self.cells:
            if (now := cell.cell_contents) is not value and not _same(value, now):
                yield Change(place, cell, None, value, now)

    def broken(self) -> str:
        """The first place where a value is another one now; "" if the capture holds."""
        try:
            if self.modes == _modes() and self._ids_now() == self._ids:
                return ""
        except (KeyError, ValueError):
            pass  # a name that is gone
        return next((change.place for change in self.changes()), "")

    def _visit_members(
        self,
        place: str,
        value: object,
        seen: set[int],
        depth: int,
        of_torch: bool = False,
        without: frozenset[str] = frozenset(),
    ) -> None:
        members = vars(value)
        if id(members) in seen:
            return
        seen.add(id(members))
        self.containers.append(_Container(place, members, of_torch, are_members=True, skipped=without))
        for key, member in self.containers[-1].items().items():
            self._visit(f"{place}.{key}", member, seen, depth - 1, of_torch)

    def _visit(self, place: str, value: object, seen: set[int], depth: int, of_torch: bool = False) -> None:
        if isinstance(value, _PLAIN) or isinstance(value, _OPAQUE) or depth < 0 or id(value) in seen:
            return
        if isinstance(value, dict | list | tuple | deque):
            seen.add(id(value))
            if not isinstance(value, tuple):
                self.containers.append(_Container(place, value, of_torch))
            for key, member in _items(value).items():
                self._visit(f"{place}[{key!r}]", member, seen, depth - 1, of_torch)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._visit_members(place, value, seen, depth, of_torch)

    def _visit_global(self, place: str, value: object, seen: set[int]) -> None:
        """Of what all code shares, no more than plain containers and the members of small objects."""
        size = len(value) if isinstance(value, dict | list | tuple) else len(getattr(value, "__dict__", ()))
        if size <= _MAX_GLOBAL_ITEMS:
            self._visit(place, value, seen, 1)


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
        torch.are_deterministic_algorithms_enabled(),
    )


def _same(before: Any, now: Any) -> bool:
    """Another object of the same plain value is no change, nor is another tensor in the place of one, or a reference to
    another tensor: recurrent layers keep a list of these, of the tensors that they have seen last.
    """
    if before is now:
        return True
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return True
    if isinstance(before, weakref.ref) and isinstance(now, weakref.ref):
        return all(isinstance(each(), torch.Tensor | None) for each in (before, now))
    if type(before) is list and type(now) is list:
        return len(before) == len(now) and all(map(_same, before, now))
    return _is_copy(before, now, _MAX_DEPTH)


def _is_copy(before: Any, now: Any, depth: int) -> bool:
    """Whether an object was replaced by one of the same class with the same members, as a library does that keeps its state
    in objects which it never changes. Their tensors are the same ones.
    """
    if before is now:
        return True
    if type(before) is not type(now) or isinstance(before, _OPAQUE) or depth < 0:
        return False
    if _is_plain(before):
        return bool(before == now)
    if isinstance(before, set):
        return all(map(_is_plain, before | now)) and before == now
    if isinstance(before, dict | list | tuple):
        one, other = _items(before), _items(now)
    elif type(before).__basicsize__ == _PLAIN_SIZE and isinstance(getattr(before, "__dict__", None), dict):
        one, other = vars(before), vars(now)
    else:
        return False
    return len(one) == len(other) and all(
        _is_copy(*keys, depth - 1) and _is_copy(one[keys[0]], other[keys[1]], depth - 1)
        for keys in zip(one, other, strict=True)
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))


def clock_outside(
    clock: Callable[[], Any], name: str, user_trace: Callable[[FrameType], str]
) -> Callable[[], Any]:
    """In place of a clock of `time`: one that this thread may not read in the user's lines."""
    thread = threading.get_ident()

    def read() -> Any:
        caller = sys._getframe(1)
        if (
            threading.get_ident() == thread
            and is_of_user(caller.f_code.co_filename)
            and not caller.f_globals.get("__name__", "").startswith(_PACKAGE)
        ):
            trace = user_trace(caller)
            raise UnsupportedModelError(
                f"the model reads a clock (time.{name})",
                location=user_location(trace),
                cure="measure time outside of the compiled model.",
            )
        return clock()

    return read


@contextlib.contextmanager
def no_generators() -> Iterator[None]:
    """Refuse draws from the generators of Python and NumPy: a graph would hold the numbers of one call."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False) if numpy else None
    yield
    used = "Python's" if random.getstate() != python_state else ""
    random.setstate(python_state)
    if numpy is not None and not _is_same(numpy.random.get_state(legacy=False), numpy_state):
        used = "NumPy's"
        numpy.random.set_state(numpy_state)
    if used:
        raise UnsupportedModelError(
            f"the model draws from {used} random generator, and a graph would repeat the numbers of its first call",
            cure="draw with torch (torch.rand, torch.randint), or outside of the compiled model.",
        )


def _is_same(state: Any, other: Any) -> bool:
    return repr(state) == repr(other) and state["state"]["key"].tolist() == other["state"]["key"].tolist()
