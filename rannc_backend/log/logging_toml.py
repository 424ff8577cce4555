"""`logging.toml`: sinks, patterns and loggers as RaNNC documents them, which is spdlog_setup's format.

In: the text of the file. Out: a checked `LoggingFile`, or a `ConfigurationFileError` with the line of what is
wrong. Nothing is opened. Terms. A *sink* is where lines go. A *logger* is one of RaNNC's (log_names.py) or a
module of ours, with its sinks and its level.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rannc_backend.errors import ConfigurationFileError
from rannc_backend.errors.base import did_you_mean, nearest
from rannc_backend.log.pattern import DEFAULT_PATTERN, TRACE, PatternError, PatternFormatter
from rannc_backend.log.rannc_names import MODULES, ROOT_LOGGER, python_loggers
from rannc_backend.settings.toml_lines import TomlFile

LEVELS: Mapping[str, int] = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "err": logging.ERROR,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
Level = Literal["trace", "debug", "info", "warn", "warning", "err", "error", "critical", "off"]
Kind = Literal[
    "stdout_sink",
    "stderr_sink",
    "color_stdout_sink",
    "color_stderr_sink",
    "basic_file_sink",
    "rotating_file_sink",
    "daily_file_sink",
    "null_sink",
]
_KINDS = get_args(Kind)
# Threads make no difference to Python's handlers: _st and _mt are the same.
_TYPES = tuple(f"{kind}_{threads}" for kind in _KINDS for threads in ("st", "mt"))
_NEEDS = {
    "basic_file_sink": ("filename",),
    "rotating_file_sink": ("base_filename", "max_size", "max_files"),
    "daily_file_sink": ("base_filename", "rotation_hour", "rotation_minute"),
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Nowhere:
    """Lines are dropped."""


@dataclass(frozen=True, slots=True)
class Console:
    """Lines go to a stream of the process, with or without colors."""

    stream: Literal["stdout", "stderr"]
    colors: bool


@dataclass(frozen=True, slots=True)
class PlainFile:
    """One file, which is begun anew by each process where `truncate` says so."""

    path: str
    truncate: bool


@dataclass(frozen=True, slots=True)
class RotatingFile:
    """A file that is renamed when it has `max_bytes`; the last `max_files` are kept."""

    path: str
    max_bytes: int
    max_files: int


@dataclass(frozen=True, slots=True)
class DailyFile:
    """A file that is renamed at this time of each day."""

    path: str
    at: datetime.time


Target = Nowhere | Console | PlainFile | RotatingFile | DailyFile
"""Where the lines of a sink go."""


class Sink(BaseModel):
    """One [[sink]] as it is written; `target` is what it means."""

    model_config = _SETTINGS

    name: str
    type: str
    level: Level = "trace"
    filename: str | None = Field(None, min_length=1)
    base_filename: str | None = Field(None, min_length=1)
    max_size: int | str | None = None
    max_files: int | None = Field(None, ge=1, le=200_000)
    rotation_hour: int | None = Field(None, ge=0, le=23)
    rotation_minute: int | None = Field(None, ge=0, le=59)
    truncate: bool = False
    create_parent_dir: bool = False

    @property
    def kind(self) -> str:
        """The type without its _st or _mt."""
        return self.type[:-3]

    @property
    def path(self) -> str | None:
        """The file that it writes; None if it writes none."""
        return self.filename or self.base_filename

    @property
    def max_bytes(self) -> int | None:
        """`max_size` in bytes; None where it is no size."""
        match = (
            re.fullmatch(r"([0-9]{1,15})([KMGT]?)", str(self.max_size).strip())
            if not isinstance(self.max_size, bool)
            else None
        )
        return int(match[1]) * _UNITS[match[2]] if match else None

    def target(self) -> Target:
        """Where its lines go; the sink has been checked."""
        match self.kind:
            case "null_sink":
                return Nowhere()
            case "basic_file_sink":
                return PlainFile(str(self.path), self.truncate)
            case "rotating_file_sink":
                return RotatingFile(str(self.path), self.max_bytes or 0, self.max_files or 1)
            case "daily_file_sink":
                return DailyFile(
                    str(self.path), datetime.time(self.rotation_hour or 0, self.rotation_minute or 0)
                )
            case kind:
                return Console("stdout" if "stdout" in kind else "stderr", kind.startswith("color"))


class Logger(BaseModel):
    """One [[logger]]. `type`, `thread_pool` and `overflow_policy` choose how spdlog writes; here every line
    is written at once.
    """

    model_config = _SETTINGS

    name: str
    sinks: tuple[str, ...] = Field(strict=False)
    level: Level = "info"
    pattern: str | None = None
    type: Literal["sync", "async"] = "sync"
    thread_pool: str | None = None
    overflow_policy: Literal["block", "overrun_oldest"] = "block"

    @property
    def python_loggers(self) -> tuple[str, ...]:
        """Names of the Python loggers that it stands for."""
        return python_loggers(self.name) or ()


class _Pattern(BaseModel):
    model_config = _SETTINGS

    name: str
    value: str


class LoggingFile(BaseModel):
    """What a file says. Sinks, patterns and loggers have different names, and refer to what there is."""

    model_config = _SETTINGS

    global_pattern: str = DEFAULT_PATTERN
    sink: tuple[Sink, ...] = Field((), strict=False)
    pattern: tuple[_Pattern, ...] = Field((), strict=False)
    logger: tuple[Logger, ...] = Field((), strict=False)
    global_thread_pool: dict[str, int] = {}
    thread_pool: tuple[dict[str, int | str], ...] = Field((), strict=False)

    def pattern_of(self, logger: Logger) -> str:
        """The pattern of a logger's lines."""
        return next(
            (pattern.value for pattern in self.pattern if pattern.name == logger.pattern), self.global_pattern
        )


def logging_file(file: TomlFile) -> LoggingFile:
    """Check what a file says. Raises ConfigurationFileError."""
    try:
        found = LoggingFile.model_validate(dict(file.values))
    except ValidationError as error:
        raise _invalid(file, error.errors(include_url=False)[0]) from None
    except RecursionError:
        raise ConfigurationFileError(
            file.path, problem="is nested too deeply", cure="write it as docs/logging.md shows."
        ) from None
    tables: dict[str, Sequence[Any]] = {
        "sink": found.sink,
        "pattern": found.pattern,
        "logger": found.logger,
    }
    for table, entries in tables.items():
        names: set[str] = set()
        for index, entry in enumerate(entries):
            if entry.name in names:
                raise _wrong(
                    file,
                    table,
                    index,
                    f"there are two of the name {entry.name!r}",
                    "give each a name of its own.",
                )
            names.add(entry.name)
    for index, sink in enumerate(found.sink):
        _check_sink(file, index, sink)
    _check_pattern(file, "global_pattern", 0, found.global_pattern)
    for index, pattern in enumerate(found.pattern):
        _check_pattern(file, "pattern", index, pattern.value)
    for index, logger in enumerate(found.logger):
        _check_logger(file, index, logger, found)
    return found


def _check_sink(file: TomlFile, index: int, sink: Sink) -> None:
    if sink.type not in _TYPES:
        raise _wrong(file, "sink", index, f"there is no type {sink.type!r}", _choice(sink.type, _TYPES))
    for key in _NEEDS.get(sink.kind, ()):
        if getattr(sink, key) is None:
            raise _wrong(file, "sink", index, f"a {sink.type} needs the key {key!r}", "add it.")
    if sink.max_size is not None and not sink.max_bytes:
        raise _wrong(
            file,
            "sink",
            index,
            f"max_size {sink.max_size!r} is no size",
            'give bytes, or as "10M" (K, M, G, T).',
        )
    if sink.path is not None and "\0" in sink.path:
        raise _wrong(file, "sink", index, "the path has a zero byte", "leave it out.")


def _check_logger(file: TomlFile, index: int, logger: Logger, found: LoggingFile) -> None:
    if python_loggers(logger.name) is None:
        cure = _choice(logger.name, MODULES) + f" Or give a module's name, as {ROOT_LOGGER}.session."
        raise _wrong(file, "logger", index, f"there is no logger {logger.name!r}", cure)
    for name in logger.sinks:
        if name not in {sink.name for sink in found.sink}:
            raise _wrong(
                file,
                "logger",
                index,
                f"there is no sink {name!r}",
                _choice(name, [sink.name for sink in found.sink]),
            )
    if logger.pattern is not None and logger.pattern not in {pattern.name for pattern in found.pattern}:
        names = [pattern.name for pattern in found.pattern]
        raise _wrong(
            file, "logger", index, f"there is no pattern {logger.pattern!r}", _choice(logger.pattern, names)
        )


def _check_pattern(file: TomlFile, table: str, index: int, pattern: str) -> None:
    try:
        PatternFormatter(pattern, rank=0)
    except PatternError as error:
        raise _wrong(file, table, index, str(error), "docs/logging.md lists the flags.") from None


def _invalid(file: TomlFile, error: Any) -> ConfigurationFileError:
    location = list(error["loc"])
    index = location[1] if len(location) > 1 and isinstance(location[1], int) else 0
    key = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"sink": Sink, "logger": Logger, "pattern": _Pattern}
        known = tables.get(str(location[0]) if len(location) > 1 else "", LoggingFile)
        return _wrong(
            file, str(location[0]), index, f"{key} is no key", _choice(str(location[-1]), known.model_fields)
        )
    if error["type"] == "missing":
        return _wrong(file, str(location[0]), index, f"{key} is missing", "add it.")
    return _wrong(file, str(location[0]), index, f"{key} has a bad value", f"{error['msg'].rstrip('.')}.")


def _wrong(file: TomlFile, key: str, index: int, problem: str, cure: str) -> ConfigurationFileError:
    return ConfigurationFileError(f"{file.place(key, index)}:", problem=problem, cure=cure)


def _choice(name: str, names: Iterable[str]) -> str:
    choices = sorted(names)
    return (
        f"{did_you_mean(nearest(name, choices))}There are: {', '.join(choices)}."
        if choices
        else "there is none yet: add one."
    )
