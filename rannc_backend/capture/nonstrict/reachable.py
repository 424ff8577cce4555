"""The Python values that the code of a model may read, beside its arguments: found from the code, not from a
run.

In: a module. Out: the functions that its forward may come to, and the names of globals and closures that they
read; and, of names of attributes, which ones they only write. What is found as read is more than a run reads: a
guard too many is a capture too many, one too few a wrong number. Functions are followed by the names in their
code: globals, attributes of imported modules, and methods of the classes of the model's modules. Code of torch and
of Python's own library is not followed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Set
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from rannc_backend.errors import is_of_user

_MAX_FUNCTIONS = 20_000
_ENTRIES = ("forward", "__call__", "__getattr__")
_FOLLOWED = (FunctionType, MethodType, ModuleType, type)
_BY_STRING = frozenset(
    {"getattr", "hasattr", "vars", "eval", "exec", "attrgetter", "__dict__", "__getattribute__"}
)
_OF_MODULES = frozenset(dir(nn.Module())) | vars(nn.Module()).keys()


class Reachable:
    """See the module docstring. `names`: by id of a dictionary and name; `cells`: by id."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.cells: dict[int, tuple[str, CellType]] = {}
        self._classes = {type(part) for part in module.modules()}
        self._methods = _methods_by_name(self._classes)
        self._seen: set[int] = set()
        self._codes: list[CodeType] = []
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

    def written(self, names: Set[str]) -> frozenset[str]:
        """Those of the names of attributes that code sets."""
        codes = (code for code in self._codes if not names.isdisjoint(_names_in(code)))
        return frozenset(names & set[str]().union(*(_attributes_in(code)[0] for code in codes)))

    def only_written(self, names: Set[str]) -> frozenset[str]:
        """Those that code sets and none reads: by no name in it and, where any reads attributes by strings, by no string.
        None if there is more code than is followed.
        """
        names = self.written(names) - _OF_MODULES
        if not names or self._waiting:
            return frozenset()
        codes = [code for code in self._codes if not names.isdisjoint(_names_in(code))]
        read = set[str]().union(*(_attributes_in(code)[1] for code in codes))
        if not all(map(_BY_STRING.isdisjoint, map(_names_in, self._codes))):
            read = read.union(*map(_strings_in, self._codes))
        return frozenset(names - read)

    def _add(self, value: object) -> None:
        """A value that code may call."""
        for function in _functions_in(value):
            if id(function) not in self._seen and is_of_user(function.__code__.co_filename):
                self._seen.add(id(function))
                self._waiting.append(function)

    def _follow(self, function: FunctionType) -> None:
        self._codes.append(function.__code__)
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


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def _names_in(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names_in, _inner(code)))


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def _globals_of(code: CodeType) -> frozenset[str]:
    """The names that code looks up among globals, in functions inside of it too."""
    loaded = frozenset(
        str(item.argval) for item in dis.get_instructions(code) if item.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return loaded.union(*map(_globals_of, _inner(code)))


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def _attributes_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of attributes that code sets, and all names that it uses otherwise, in functions inside of it too."""
    written, read = set[str](), set[str]()
    for item in dis.get_instructions(code):
        if item.opcode in dis.hasname:
            (written if item.opname == "STORE_ATTR" else read).add(str(item.argval))
    for inner in map(_attributes_in, _inner(code)):
        written |= inner[0]
        read |= inner[1]
    return frozenset(written), frozenset(read)


def _strings_in(code: CodeType) -> set[str]:
    constants: list[object] = [*code.co_consts]
    found = set[str]()
    while constants:
        constant = constants.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            constants += constant
        elif isinstance(constant, CodeType):
            constants += constant.co_consts
    return found


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


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def names_set_by(cls: type) -> frozenset[str]:
    """The names of attributes that methods of the user's classes set, but for constructors."""
    bases = [base for base in cls.__mro__ if is_of_user(file_of(base))]
    members = (value for base in bases for name, value in vars(base).items() if name != "__init__")
    codes = (function.__code__ for member in members for function in _functions_in(member))
    return frozenset[str]().union(*(_attributes_in(code)[0] for code in codes)) - _OF_MODULES


@functools.lru_cache(maxsize=_MAX_FUNCTIONS)
def names_in_library_code(cls: type) -> frozenset[str]:
    """All names in the code of classes of torch and of Python that a module's class inherits from."""
    bases = [base for base in cls.__mro__ if base is not object and not is_of_user(file_of(base))]
    functions = (code for base in bases for member in vars(base).values() for code in _functions_in(member))
    return frozenset[str]().union(*(_names_in(function.__code__) for function in functions))


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
