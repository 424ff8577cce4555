"""The Python values that the code of a model may read, beside its arguments: found from the code, not from a
run.

In: a module. Out: the functions that its forward may come to, and the names of globals and closures that they
read. What is found is more than a run reads: a guard too many is a capture too many, one too few a wrong
number. Functions are followed by the names in their code: globals, attributes of imported modules, and
methods of the classes of the model's modules. Code of torch and of Python's own library is not followed.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from rannc_backend.errors import is_of_user

_MAX_FUNCTIONS = 20_000
_ENTRIES = ("forward", "__call__", "__getattr__")
_FOLLOWED = (FunctionType, MethodType, ModuleType, type)


class Reachable:
    """See the module docstring. `names`: by id of a dictionary and name; `cells`: by id."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.cells: dict[int, tuple[str, CellType]] = {}
        self._classes = {type(part) for part in module.modules()}
        self._methods = _methods_by_name(self._classes)
        self._seen: set[int] = set()
        self._waiting: list[FunctionType] = []
        for cls in self._classes:
            for name in _ENTRIES:
                self._add(inspect.getattr_static(cls, name, None))
        for part in module.modules():
            for value in vars(part).values():
                self._add(value)
                if isinstance(value, dict):
                    for hook in value.values():
                        self._add(hook)
        while self._waiting and len(self._seen) < _MAX_FUNCTIONS:
            self._follow(self._waiting.pop())

    def _add(self, value: object) -> None:
        """A value that code may call."""
        for function in _functions_in(value):
            if id(function) not in self._seen and is_of_user(function.__code__.co_filename):
                self._seen.add(id(function))
                self._waiting.append(function)

    def _follow(self, function: FunctionType) -> None:
        names = _names_in(function.__code__)
        modules: list[ModuleType] = []
        for name in names:
            for method in self._methods.get(name, ()):
                self._add(method)
            if name in function.__globals__:
                value = function.__globals__[name]
                # Names of attributes are names too: of a value, whether the code reads it is worth a look.
                if not isinstance(value, _FOLLOWED) and name not in _globals_of(function.__code__):
                    continue
                self.names[id(function.__globals__), name] = (function.__globals__, name)
                self._add(value)
                if isinstance(value, ModuleType) and is_of_user(getattr(value, "__file__", None) or "<"):
                    modules.append(value)
        for module in modules:
            for name in names:
                if name in vars(module):
                    self.names[id(vars(module)), name] = (vars(module), name)
                    self._add(vars(module)[name])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.cells[id(cell)] = (f"{function.__qualname__}.{name}", cell)
            self._add(value)


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _globals_of(code: CodeType) -> set[str]:
    """The names that code looks up among globals, in functions inside of it too."""
    loaded = {
        str(item.argval) for item in dis.get_instructions(code) if item.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return loaded.union(*map(_globals_of, inner))


def _functions_in(value: object) -> Iterator[FunctionType]:
    """The Python functions behind a callable, a property, a class."""
    if isinstance(value, FunctionType):
        yield value
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _functions_in(wrapped)
    elif isinstance(value, MethodType):
        yield from _functions_in(value.__func__)
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, type) and is_of_user(file_of(value)):
        for member in vars(value).values():
            if not isinstance(member, type):
                yield from _functions_in(member)


def file_of(cls: type) -> str:
    """The file that a class is from; "<" if none is known."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<"


def _methods_by_name(classes: set[type]) -> dict[str, list[Callable[..., Any]]]:
    found: dict[str, list[Callable[..., Any]]] = {}
    for base in {base for cls in classes for base in cls.__mro__}:
        if is_of_user(file_of(base)):
            for name, member in vars(base).items():
                if not isinstance(member, type):
                    found.setdefault(name, []).append(member)
    return found
