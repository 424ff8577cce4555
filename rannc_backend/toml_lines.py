"""TOML files that users write, with the line of every value: for errors that name the place.

In: a path. Out: a `TomlFile`, or a `ConfigurationFileError` for what is not a readable file, too long, no UTF-8 or no TOML. Nothing
in a file is ever run. Terms. A *statement* is a key with its value, or a table's header; it begins on its *line*, counted from 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rannc_backend.errors import ConfigurationFileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlFile:
    """`values`: what the file says. `lines`: where the statements of each key of the top level begin, or its tables."""

    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, tuple[int, ...]]

    def place(self, key: str, index: int = 0) -> str:
        """Where the file says it, in words: "/home/me/.pyrannc/rannc_conf.toml, line 3". `index`: which of an array's tables."""
        lines = self.lines.get(key, ())
        return f"{self.path}, line {lines[min(index, len(lines) - 1)]}" if lines else self.path


def read_toml(path: Path) -> TomlFile | None:
    """The file; None if there is none.

    Raises:
        ConfigurationFileError: it is there but is no file, cannot be read, is too long, is no UTF-8 text or no TOML.
    """
    text = _read(path)
    return None if text is None else parse_toml(text, path=str(path))


def parse_toml(text: str, *, path: str) -> TomlFile:
    """The file of that text. Raises as `read_toml`."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and so are too many digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationFileError(path, problem=f"is not TOML: {reason}", cure="write name = value, one to a line.") from None
    lines: dict[str, tuple[int, ...]] = {}
    for key, line in _statements(text):
        lines[key] = (*lines.get(key, ()), line)
    return TomlFile(path=path, values=values, lines=lines)


def _read(path: Path) -> str | None:
    try:
        if not path.exists():
            return None
        if not path.is_file():  # a device or a pipe may never end
            raise ConfigurationFileError(str(path), problem="is not a file", cure="put a text file in its place.")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationFileError(str(path), problem=f"cannot be read: {error.strerror}", cure="make it readable.") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationFileError(str(path), problem=f"has more than {MAX_FILE_BYTES} bytes", cure="leave out what is no item.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationFileError(str(path), problem=f"is not UTF-8 text ({error.reason})", cure="save it as UTF-8.") from None


def _statements(text: str) -> Iterator[tuple[str, int]]:
    """Keys of the top level in a valid text, each with a line on which one of its statements begins, in order.

    No proper beginning of a statement, up to the end of a line, is valid TOML; so lines are gathered until what is gathered is valid.
    """
    gathered, begin, in_table = "", 1, False
    for number, line in enumerate(text.split("\n"), start=1):
        gathered += line + "\n"
        try:
            keys = list(tomllib.loads(gathered))
        except ValueError:
            continue
        is_header = gathered.lstrip(" \t\r\n").startswith("[")
        if keys and (is_header or not in_table):
            yield keys[0], begin
        in_table = in_table or is_header
        gathered, begin = "", number + 1
