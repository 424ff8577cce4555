"""Which versions of torch this package runs on, and one clear line for the others.

In: a version text such as "2.13.0+cpu". Out: nothing, or an error for an
older one; `log.startup` warns about a newer one.
"""

from __future__ import annotations

import re

from rannc_backend.errors import LaunchError

OLDEST = (2, 11)
NEWEST = (2, 15)


def is_older(version: str, than: tuple[int, int]) -> bool:
    """Whether ``version`` is known to be older than these two numbers."""
    found = numbers_of(version)
    return found is not None and found < than


def refuse_old_torch(version: str) -> None:
    """Raise LaunchError if ``version`` is older than `OLDEST`."""
    if is_older(version, OLDEST):
        raise LaunchError(
            f"torch {version} is too old for this backend",
            cure=f"install torch {version_text(OLDEST)} to {version_text(NEWEST)}.",
        )


def numbers_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version text; None where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def version_text(version: tuple[int, int]) -> str:
    """Such as "2.13"."""
    return ".".join(map(str, version))
