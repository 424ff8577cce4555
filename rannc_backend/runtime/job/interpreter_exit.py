"""With which SystemExit the interpreter ends, if with one: told to what runs at exit, so that one that was
caught does not count.

In: nothing. Out: an `InterpreterExit`. Python shows the SystemExit that nobody caught to no hook, and atexit
handlers come after it. What it does is to read the exception's ``code`` with no Python frame on the stack,
which nothing else can do. So that member of SystemExit has a reader in front here, for `raise SystemExit(3)`,
`exit()`, argparse and `sys.exit` alike. Up to Python 3.11 sys.exit makes no exception until somebody looks at
it; it makes one here. Seen on CPython 3.10 to 3.13.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rannc_backend.settings import hooks

_MEMBER = "code"
_CODE_BITS = 0xFF
_LARGEST = 2**63


class InterpreterExit:
    """What the interpreter read last, without a frame. One per process, as it is put in place for good."""

    def __init__(self) -> None:
        self._status: object = None
        self._is_watching = False

    @property
    def code(self) -> int:
        """The exit code that the SystemExit which ends the process leads to; 0 without one."""
        return exit_code(self._status)

    @property
    def text(self) -> str:
        """As the user wrote it, about: "sys.exit(3)"."""
        return (
            f"sys.exit({self._status!r})"
            if isinstance(self._status, int | str)
            else f"sys.exit({type(self._status).__name__})"
        )

    def watch(self) -> None:
        """From now on notice it. Does nothing when called again."""
        if self._is_watching:
            return
        self._is_watching = True
        members = next(
            (found for found in gc.get_referents(SystemExit.__dict__) if isinstance(found, dict)), {}
        )
        if _MEMBER in members:
            hooks.replace_item("SystemExit", members, _MEMBER, _Reader(members[_MEMBER], self._note))
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
        hooks.replace("SystemExit", sys, "exit", _raising(sys.exit))

    def _note(self, status: object) -> None:
        self._status = status


class _Reader:
    """In front of the member of SystemExit: as it, and tells what is read without a frame."""

    def __init__(self, member: Any, note: Callable[[object], None]) -> None:
        self._member, self._note = member, note

    def __get__(self, error: object, kind: type | None = None) -> Any:
        status = self._member.__get__(error, kind)
        try:
            sys._getframe(1)
        except ValueError:
            self._note(status)
        return status

    def __set__(self, error: object, status: object) -> None:
        self._member.__set__(error, status)

    def __delete__(self, error: object) -> None:
        self._member.__delete__(error)


def _raising(before: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """``sys.exit`` with an exception of its own; one that somebody has put in its place stays."""
    if type(before) is not type(len):
        return before

    def exit(status: Any = None, /) -> NoReturn:  # noqa: A001
        if isinstance(status, SystemExit):
            raise status
        raise SystemExit(*(() if status is None else status if isinstance(status, tuple) else (status,)))

    return exit


def exit_code(status: object) -> int:
    """The exit code of a process that SystemExit(status) ends."""
    if status is None:
        return 0
    if not isinstance(status, int):
        return 1
    return int(status) & _CODE_BITS if -_LARGEST <= status < _LARGEST else _CODE_BITS


class _RunAlready:
    """Equal to a function that runs at exit, and to all that were registered after it: those run before
    it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, own: Callable[[], object]) -> None:
        self._own, self._has_passed = own, False

    def __eq__(self, other: object) -> bool:
        self._has_passed = self._has_passed or other == self._own
        return self._has_passed


def run_other_exit_functions(own: Callable[[], object]) -> None:
    """Called at exit by ``own``, which is going to end the process: run what would run after it. Each
    function runs once.
    """
    # It compares in the order in which they were registered. The other name is private but as old as atexit.
    atexit.unregister(_RunAlready(own))  # type: ignore[arg-type]
    atexit._run_exitfuncs()
