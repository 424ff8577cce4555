"""What one planted fault is, and how it is put into a file.

In: a file's text. Out: the changed text. Terms: a fault is *stale* when what it replaces is not in the file
any more, or is there twice.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


class StaleFault(Exception):
    """The source has changed, and the fault does not say where it goes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file.

    Attributes:
        name: unique, short; what is wrong.
        path: file, relative to the package as it is installed (`runtime/rows.py`,
        `passes/batch/randomness.py`).
        find: text that is there once.
        replacement: what is put in its place.
        tests: arguments of pytest. Those of tests/distributed run after all others.
        function, statement: the function and the statement around a drawn fault; "" for a chosen one.
        start: where in the file a drawn fault's text begins; -1 for a chosen one.
    """

    name: str
    path: str
    find: str
    replacement: str
    tests: tuple[str, ...]
    function: str = ""
    statement: str = ""
    start: int = -1

    @property
    def change(self) -> str:
        """The change in one line, which says the same as long as the code around it does."""
        where = f"{self.path}:{self.function}: {_one_line(self.statement)}" if self.function else self.path
        return f"{where}: {_one_line(self.find)} -> {_one_line(self.replacement)}"

    def applied(self, source: str) -> str:
        """The file with the fault in it.

        Raises:
            StaleFault: the text is not there once, or the result is no Python.
        """
        if self.start >= 0:
            place = self.start if source.startswith(self.find, self.start) else -1
        else:
            place = source.find(self.find) if source.count(self.find) == 1 else -1
        if place < 0:
            raise StaleFault(f"{self.path} has {source.count(self.find)} times: {_one_line(self.find)}")
        changed = source[:place] + self.replacement + source[place + len(self.find) :]
        if changed == source:
            raise StaleFault(f"{self.name} changes nothing")
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise StaleFault(
                f"{self.path} is no Python with the fault in line {error.lineno}: {error.msg}"
            ) from None
        return changed


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
