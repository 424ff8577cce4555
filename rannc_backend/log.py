"""The logger `rannc_backend`: who speaks, how loud, and each thing once.

In: this process's rank and the environment (RANNC_LOG_LEVEL). Out: lines on stderr such as
`[rannc rank 0] 2 stages, 4 micro-batches`. Rank 0 speaks for all; the other ranks are heard from "warning" upwards,
or in everything when the level is "debug". Handlers of the user's own root logger take the place of ours.
Modules log through `logging.getLogger(__name__)` and never print.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rannc_backend.errors import OptionValueError

ROOT_LOGGER = "rannc_backend"
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def setup_logging(rank: int, environ: Mapping[str, str]) -> None:
    """Give the logger its level and, once per process, its handler. May be called again, when the rank is known.

    A level that the user set on the logger stays, unless RANNC_LOG_LEVEL is there.

    Raises:
        OptionValueError: RANNC_LOG_LEVEL is not a level.
    """
    logger = logging.getLogger(ROOT_LOGGER)
    requested = environ.get("RANNC_LOG_LEVEL")
    level = LEVELS.get((requested or "info").strip().lower())
    if level is None:
        names = ", ".join(repr(name) for name in LEVELS)
        raise OptionValueError("log_level", value=requested, source="environment RANNC_LOG_LEVEL", expected=names)
    handler = next((handler for handler in logger.handlers if isinstance(handler, _RankHandler)), None)
    level_is_ours = handler is not None or logger.level == logging.NOTSET
    if handler is None:
        handler = _RankHandler()
        logger.addHandler(handler)
    handler.setFormatter(_RankFormatter(rank))
    if requested or level_is_ours:
        speaks_for_all = rank == 0 or level == logging.DEBUG
        logger.setLevel(level if speaks_for_all else max(level, logging.WARNING))


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


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, and keeps silent once the user's root logger has handlers: they get the records anyway."""

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
