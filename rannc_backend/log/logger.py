"""The logger `rannc_backend`: who speaks, how loud, where to, and each thing once.

In: this process's rank and the environment: RANNC_LOG_LEVEL, and `logging.toml` in the configuration
directory. Out: lines on stderr such as `[rannc rank 0] 2 stages, 4 micro-batches`, or what the file asks for.
Rank 0 speaks for all; the other ranks are heard from "warning" upwards, or in everything where the level is
"debug". Handlers of the user's own root logger take the place of ours on the terminal, and those that
TORCH_LOGS makes take the place of all of ours. Modules log through `logging.getLogger(__name__)` and never
print.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rannc_backend.errors import OptionValueError
from rannc_backend.log.logging_toml import logging_file
from rannc_backend.log.rannc_names import ROOT_LOGGER
from rannc_backend.log.sinks import SinkHandler, level_on_rank
from rannc_backend.settings import hooks
from rannc_backend.settings.sources import configuration_directory
from rannc_backend.settings.toml_lines import read_toml, toml_file
from rannc_backend.settings.user_files import kind_of

LOGGING_FILE = "logging.toml"
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def is_logging_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether RANNC_LOG_LEVEL or `logging.toml` says what is to be told. Raises ConfigurationFileError:
    RANNC_CONF_DIR is no directory.
    """
    directory = configuration_directory(environ)
    return "RANNC_LOG_LEVEL" in environ or (
        directory is not None and bool(kind_of(toml_file(directory / LOGGING_FILE)))
    )


def setup_logging(rank: int, environ: Mapping[str, str]) -> None:
    """Give the logger its level and, once per process, its handler. May be called again, when the rank is
    known.

    A level that the user set on the logger stays, unless RANNC_LOG_LEVEL or the file sets it.

    Raises:
        OptionValueError: RANNC_LOG_LEVEL is not a level.
        ConfigurationFileError: `logging.toml` is wrong, or a file that it names cannot be written.
    """
    logger = logging.getLogger(ROOT_LOGGER)
    requested = environ.get("RANNC_LOG_LEVEL")
    level = LEVELS.get((requested or "info").strip().lower())
    if level is None:
        names = ", ".join(repr(name) for name in LEVELS)
        raise OptionValueError(
            "log_level", value=requested, source="environment RANNC_LOG_LEVEL", expected=names, choices=LEVELS
        )
    if any(_is_of_torch(handler) for handler in logger.handlers):
        return  # TORCH_LOGS names the package: its handler and its levels are what was asked for
    directory = configuration_directory(environ)
    file = None if directory is None else read_toml(directory / LOGGING_FILE)
    ours = next(
        (handler for handler in logger.handlers if isinstance(handler, _RankHandler | SinkHandler)), None
    )
    level_is_ours = ours is not None or logger.level == logging.NOTSET
    handler = _RankHandler(rank) if file is None else SinkHandler(logging_file(file), file=file, rank=rank)
    if ours is not None:
        logger.removeHandler(ours)
        ours.close()
    hooks.register("log handler", logger.addHandler, handler)
    if requested or level_is_ours:
        logger.setLevel(level_on_rank(level, rank))
    if isinstance(handler, SinkHandler):
        handler.set_levels(but_not_root=bool(requested))


def say_once(logger: logging.Logger, message: str, *args: object, level: int = logging.INFO) -> None:
    """Log a message the first time that this logger is given this template; later calls do nothing."""
    once = next((filter_ for filter_ in logger.filters if isinstance(filter_, _SaidOnce)), None)
    if once is None:
        once = _SaidOnce()
        logger.addFilter(once)
    if once.is_first(message):
        logger.log(level, message, *args, stacklevel=2)


class _SaidOnce(logging.Filter):
    """Holds what a logger has said once; lets every record pass."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def is_first(self, message: str) -> bool:
        first = message not in self._said
        self._said.add(message)
        return first


def _is_of_torch(handler: logging.Handler) -> bool:
    # By where its formatter comes from, without importing torch; a test names the versions for which this
    # holds.
    return type(handler.formatter).__module__.startswith("torch._logging")


class _RankHandler(logging.StreamHandler):
    """Writes to stderr, and keeps silent once the user's root logger has handlers: they get the records
    anyway.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.setFormatter(_RankFormatter(rank))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


class _RankFormatter(logging.Formatter):
    """Every line carries the rank, since a launcher mixes the lines of all ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._prefix = f"[rannc rank {rank}] "

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = level + super().format(record)
        return "\n".join(self._prefix + line for line in text.split("\n"))
