"""Which versions of torch this package runs on, and one clear line for the others.

In: a version text such as "2.13.0+cpu". Out: nothing, a warning for a newer torch than was tried, or an error for an older one.
"""

from __future__ import annotations

import logging
import re

from rannc_backend.errors import LaunchError
from rannc_backend.log import say_once

logger = logging.getLogger(__name__)

OLDEST = (2, 11)
NEWEST = (2, 13)


def is_older(version: str, than: tuple[int, int]) -> bool:
    """Whether ``version`` is known to be older than these two numbers."""
    found = _numbers(version)
    return found is not None and found < than


def refuse_old_torch(version: str) -> None:
    """Raise LaunchError if ``version`` is older than `OLDEST`."""
    if is_older(version, OLDEST):
        raise LaunchError(
            f"torch {version} is too old for this backend", cure=f"install torch {_text(OLDEST)} to {_text(NEWEST)}."
        )


def mention_untried_torch(version: str) -> None:
    """Say once that ``version`` is newer than `NEWEST`."""
    found = _numbers(version)
    if found is not None and found > NEWEST:
        say_once(
            logger,
            "torch %s is newer than this backend has been tried on (%s to %s); if it fails, use one of those",
            version,
            _text(OLDEST),
            _text(NEWEST),
            level=logging.WARNING,
        )


def _numbers(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
