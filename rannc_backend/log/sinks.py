"""The sinks of `logging.toml` at work: one handler on the logger `rannc_backend`, which gives each record to
its logger's sinks.

In: a checked `LoggingFile`, the rank. Out: lines on the terminal and in files. A file belongs to one rank:
rank 0 writes the file of that name, rank 3 `log.rank3.txt` in place of `log.txt`, and a file appears with its
first line.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rannc_backend.errors import ConfigurationFileError
from rannc_backend.log.logging_toml import (
    LEVELS,
    Console,
    DailyFile,
    Logger,
    LoggingFile,
    Nowhere,
    PlainFile,
    RotatingFile,
    Sink,
)
from rannc_backend.log.pattern import PatternFormatter
from rannc_backend.log.rannc_names import ROOT_LOGGER
from rannc_backend.settings.toml_lines import TomlFile
from rannc_backend.settings.user_files import UserFile, make_directory, require_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Where the records of one logger go."""

    display_name: str
    level: int
    sinks: tuple[logging.Handler, ...]
    formatter: PatternFormatter


class SinkHandler(logging.Handler):
    """Hands records on. `set_levels` sets the levels of the Python loggers that the file names; `close` takes
    them back.

    Raises ConfigurationFileError for a file that cannot be written.
    """

    def __init__(self, content: LoggingFile, *, file: TomlFile, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._sinks: Mapping[str, logging.Handler] = {
            sink.name: _make_sink(sink, rank, file.place("sink", index))
            for index, sink in enumerate(content.sink)
        }
        self._routes: dict[str, _Route] = {}
        for logger in content.logger:
            route = self._route(logger, content)
            self._routes |= dict.fromkeys(logger.python_loggers, route)
        self._levelled: list[str] = []

    def set_levels(self, *, but_not_root: bool) -> None:
        """Set levels as the file says. `but_not_root`: the level of `rannc_backend` was set by something that
        goes first.
        """
        for name, route in self._routes.items():
            if name == ROOT_LOGGER and but_not_root:
                continue
            logging.getLogger(name).setLevel(level_on_rank(route.level, self._rank))
            self._levelled.append(name)

    def emit(self, record: logging.LogRecord) -> None:
        """Give the record to the sinks of the logger nearest to it."""
        route = self._nearest(record.name)
        if route is None:
            return
        for sink in route.sinks:
            if record.levelno >= sink.level:
                sink.setFormatter(route.formatter)
                sink.handle(record)

    def close(self) -> None:
        """Close the files, and give the loggers that were given levels none again."""
        for name in self._levelled:
            logging.getLogger(name).setLevel(logging.NOTSET)
        self._levelled.clear()
        for sink in self._sinks.values():
            sink.close()
        super().close()

    def _nearest(self, name: str) -> _Route | None:
        while name:
            if name in self._routes:
                return self._routes[name]
            name = name.rpartition(".")[0]
        return None

    def _display_name(self, name: str) -> str:
        route = self._nearest(name)
        return name if route is None else route.display_name

    def _route(self, logger: Logger, content: LoggingFile) -> _Route:
        return _Route(
            display_name=logger.name,
            level=LEVELS[logger.level],
            sinks=tuple(self._sinks[name] for name in dict.fromkeys(logger.sinks)),
            formatter=PatternFormatter(
                content.pattern_of(logger), rank=self._rank, display_name=self._display_name
            ),
        )


class _Console(logging.StreamHandler):
    """Writes to stdout or stderr as they are at the moment; silent once the user's root logger has
    handlers.
    """

    def __init__(self, name: str, *, colors: bool) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name
        self._colors = colors

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._stream_name == "stdout" else sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(self.formatter, PatternFormatter), "a sink without a pattern"
        return self.formatter.render(record, colored=self._colors and self.stream.isatty())


def _make_sink(sink: Sink, rank: int, place: str) -> logging.Handler:
    handler = _handler(sink, rank, place)
    handler.setLevel(LEVELS[sink.level])
    return handler


def _handler(sink: Sink, rank: int, place: str) -> logging.Handler:
    target = sink.target()
    match target:
        case Nowhere():
            return logging.NullHandler()
        case Console(stream, colors):
            return _Console(stream, colors=colors)
    path = rank_path(target.path, rank)
    _check_writable(path, place, make_folder=sink.create_parent_dir)
    match target:
        case PlainFile(truncate=truncate):
            return logging.FileHandler(path, mode="w" if truncate else "a", encoding="utf-8", delay=True)
        case RotatingFile(max_bytes=size, max_files=number):
            return logging.handlers.RotatingFileHandler(
                path, maxBytes=size, backupCount=number, encoding="utf-8", delay=True
            )
        case DailyFile(at=at):
            return logging.handlers.TimedRotatingFileHandler(
                path, when="midnight", atTime=at, encoding="utf-8", delay=True
            )


def level_on_rank(level: int, rank: int) -> int:
    """Rank 0 speaks for all; the others are heard from "warning" upwards, or in everything at "debug" and
    below.
    """
    return level if rank == 0 or level <= logging.DEBUG else max(level, logging.WARNING)


def rank_path(path: str, rank: int) -> Path:
    """The file of a rank: "log.txt" of rank 3 is "log.rank3.txt"."""
    whole = Path(path)
    return whole if rank == 0 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


def _check_writable(path: Path, place: str, *, make_folder: bool) -> None:
    """Before the first line, whose failure would be told in the middle of a run."""
    cure = "give another path, or make the folder (create_parent_dir = true does)."

    def error(problem: str, *, cure: str) -> ConfigurationFileError:
        return ConfigurationFileError(f"{place}:", problem=problem, cure=cure)

    file = UserFile(path=path, what="log file", error=error, cure=cure)
    if make_folder:
        make_directory(replace(file, path=path.parent, what="folder of the log file"))
    require_writable(file)
