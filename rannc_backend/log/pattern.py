"""spdlog's patterns, such as "[%Y-%m-%d %T.%f] [%L] <%n>: %v", for Python's logging.

In: a pattern, the rank. Out: a `PatternFormatter`, or a `PatternError` that names the flag which does not
exist. Flags mean what they mean to spdlog; `%&` (its diagnostic context) is the rank. Terms. A *flag* is %
and a letter, with an alignment and a width between them if wanted: %8l, %-8l, %=8l, and %8!l to cut what is
longer.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime

DEFAULT_PATTERN = "[%Y-%m-%d %H:%M:%S.%e] [%n] [%^%l%$] %v"
TRACE = 5
_MAX_CHARACTERS = 1000

# (spdlog's name, its letter, its colour as ANSI codes), for records of this level and above.
_LEVELS = (
    (logging.CRITICAL, "critical", "C", "1;41"),
    (logging.ERROR, "error", "E", "1;31"),
    (logging.WARNING, "warning", "W", "1;33"),
    (logging.INFO, "info", "I", "32"),
    (logging.DEBUG, "debug", "D", "36"),
    (0, "trace", "T", "37"),
)
_FLAG = re.compile(r"%(?:(?P<align>[-=]?)(?P<width>\d{1,2})(?P<cut>!?))?(?P<flag>.)", re.DOTALL)


class PatternError(ValueError):
    """A pattern with a flag that does not exist; the text says which."""


class PatternFormatter(logging.Formatter):
    """Formats records by a pattern. `display_name` gives what %n shows for a Python logger's name.

    Raises PatternError.
    """

    def __init__(self, pattern: str, *, rank: int, display_name: Callable[[str], str] = str) -> None:
        super().__init__()
        self._rank = rank
        self._display_name = display_name
        self._previous: float | None = None
        self._pieces = _pieces(pattern)

    def format(self, record: logging.LogRecord) -> str:
        """Without colours."""
        return self.render(record, colored=False)

    def render(self, record: logging.LogRecord, *, colored: bool) -> str:
        """The record as text; between %^ and %$ in the colour of its level."""
        moment = datetime.fromtimestamp(record.created).astimezone()
        parts = [
            piece if isinstance(piece, str) else self._value(piece, record, moment, colored=colored)
            for piece in self._pieces
        ]
        self._previous = record.created
        text = "".join(parts)
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        return f"{text}\n{record.exc_text}" if record.exc_text else text

    def _value(
        self, piece: re.Match[str], record: logging.LogRecord, moment: datetime, *, colored: bool
    ) -> str:
        flag = piece["flag"]
        if flag in "^$":
            return "" if not colored else f"\x1b[{_level(record)[3]}m" if flag == "^" else "\x1b[0m"
        if flag in _OF_RECORD:
            text = _OF_RECORD[flag](record)
        elif flag in _OF_TIME:
            text = _OF_TIME[flag](moment)
        elif flag in _ELAPSED:
            text = str(round((record.created - (self._previous or record.created)) * _ELAPSED[flag]))
        elif flag == "n":
            text = self._display_name(record.name)
        else:
            text = "%" if flag == "%" else f"rank {self._rank}"
        return _aligned(text, piece["align"] or "", int(piece["width"] or 0), cut=bool(piece["cut"]))


def _pieces(pattern: str) -> list[str | re.Match[str]]:
    if len(pattern) > _MAX_CHARACTERS:
        raise PatternError(f"the pattern has more than {_MAX_CHARACTERS} characters")
    pieces: list[str | re.Match[str]] = []
    position = 0
    for match in _FLAG.finditer(pattern):
        if match["flag"] not in FLAGS:
            raise PatternError(f"the pattern has {match[0]!r}, and there is no flag {match['flag']!r}")
        pieces += [
            pattern[position : match.start()],
            *(_pieces(DEFAULT_PATTERN) if match["flag"] == "+" else [match]),
        ]
        position = match.end()
    if "%" in pattern[position:]:
        raise PatternError("the pattern ends with % and no flag; %% is a percent sign")
    return [*pieces, pattern[position:]]


def _level(record: logging.LogRecord) -> tuple[int, str, str, str]:
    return next(level for level in _LEVELS if record.levelno >= level[0])


def _aligned(text: str, align: str, width: int, *, cut: bool) -> str:
    if align == "-":
        text = text.ljust(width)
    elif align == "=":
        text = text.center(width)
    else:
        text = text.rjust(width)
    return text[:width] if cut else text


def _offset(moment: datetime) -> str:
    text = moment.strftime("%z")
    return f"{text[:3]}:{text[3:5]}"


_OF_RECORD: Mapping[str, Callable[[logging.LogRecord], str]] = {
    "v": lambda record: record.getMessage(),
    "t": lambda record: str(record.thread),
    "P": lambda record: str(record.process),
    "l": lambda record: _level(record)[1],
    "L": lambda record: _level(record)[2],
    "@": lambda record: f"{record.pathname}:{record.lineno}",
    "s": lambda record: record.filename,
    "g": lambda record: record.pathname,
    "#": lambda record: str(record.lineno),
    "!": lambda record: record.funcName or "",
    # Of the second, from what the record has: a float, good to about a microsecond.
    "F": lambda record: f"{round(record.created % 1 * 1e9) % 10**9:09d}",
}
_SAME_AS_TIME = {
    "a": "%a",
    "A": "%A",
    "b": "%b",
    "h": "%b",
    "B": "%B",
    "c": "%a %b %d %H:%M:%S %Y",
    "C": "%y",
    "Y": "%Y",
    "D": "%m/%d/%y",
    "x": "%m/%d/%y",
    "m": "%m",
    "d": "%d",
    "H": "%H",
    "I": "%I",
    "M": "%M",
    "S": "%S",
    "p": "%p",
    "r": "%I:%M:%S %p",
    "R": "%H:%M",
    "T": "%H:%M:%S",
    "X": "%H:%M:%S",
    "f": "%f",
}


def _strftime(text: str, moment: datetime) -> str:
    return moment.strftime(text)


_OF_TIME: Mapping[str, Callable[[datetime], str]] = {
    **{flag: functools.partial(_strftime, text) for flag, text in _SAME_AS_TIME.items()},
    "e": lambda moment: f"{moment.microsecond // 1000:03d}",
    "E": lambda moment: str(int(moment.timestamp())),
    "z": _offset,
}
# Units of a second: time since the record before.
_ELAPSED: Mapping[str, float] = {"u": 1e9, "i": 1e6, "o": 1e3, "O": 1.0}
FLAGS = frozenset({*_OF_RECORD, *_OF_TIME, *_ELAPSED, *"n&%^$+"})
"""Every flag that a pattern may have; %+ stands for `DEFAULT_PATTERN`."""
