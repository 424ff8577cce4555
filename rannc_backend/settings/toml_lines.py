"""TOML files that users write, with the line of every value: for errors that name the place.

In: a path. Out: a `TomlFile`, or a `ConfigurationFileError` for what is not a readable file, too long, no
UTF-8 or no TOML. Nothing in a file is ever run. Terms. A *statement* is a key with its value, or a table's
header; it begins on its *line*, counted from 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rannc_backend.errors import ConfigurationFileError
from rannc_backend.errors.base import error_about
from rannc_backend.settings import user_files
from rannc_backend.settings.user_files import UserFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlFile:
    """`values`: what the file says. `lines`: where the statements of each key of the top level begin, or its
    tables.
    """

    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, tuple[int, ...]]

    def place(self, key: str, index: int = 0) -> str:
        """Where the file says it, in words: "/home/me/.pyrannc/rannc_conf.toml, line 3". `index`: which of an
        array's tables.
        """
        lines = self.lines.get(key, ())
        return f"{self.path}, line {lines[min(index, len(lines) - 1)]}" if lines else self.path


def read_toml(path: Path) -> TomlFile | None:
    """The file; None if there is none.

    Raises:
        ConfigurationFileError: it is there but is no file, cannot be read, is too long, is no UTF-8 text or
        no TOML.
    """
    text = user_files.find_text(toml_file(path), MAX_FILE_BYTES)
    return None if text is None else parse_toml(text, path=str(path))


def toml_file(path: Path) -> UserFile:
    """A file of the configuration directory."""
    error = partial(error_about, ConfigurationFileError, str(path))
    source = "RANNC_CONF_DIR, or ~/.pyrannc"
    return UserFile(
        path=path, what="configuration file", named_by=source, error=error, cure="put a text file there."
    )


def parse_toml(text: str, *, path: str) -> TomlFile:
    """The file of that text. Raises as `read_toml`."""
    try:
        values = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError is a ValueError, and so are too many digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationFileError(
            path, problem=f"is not TOML: {reason}", cure="write name = value, one to a line."
        ) from None
    lines: dict[str, tuple[int, ...]] = {}
    for key, line in _statements(text):
        lines[key] = (*lines.get(key, ()), line)
    return TomlFile(path=path, values=values, lines=lines)


def _statements(text: str) -> Iterator[tuple[str, int]]:
    """Keys of the top level in a valid text, each with a line on which one of its statements begins, in
    order.

    No proper beginning of a statement, up to the end of a line, is valid TOML; so lines are gathered until
    what is gathered is valid.
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
