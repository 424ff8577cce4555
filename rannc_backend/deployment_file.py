"""Plans and reports as files.

In: a path. Out: a checked `Plan`, or a file that appears at once or not at all. Nothing in a file is ever run. Reading a plan that does
not exist, is a directory, is no UTF-8 text, is too long, or is no plan is a `PlanError` that names the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from rannc_backend.errors import PlanError, UserInputError
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_text import MAX_PLAN_CHARACTERS


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, checked in itself; `ir.plan.check_against` checks it against a model."""
    return Plan.from_json(read_plan_text(path))


def read_plan_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan file."""
    place = Path(path)
    # Not what a device or a pipe gives: that may never end.
    if place.exists() and not place.is_file():
        raise PlanError(f"cannot read the plan {str(place)!r}: it is not a file", cure="give the path of a plan file.")
    try:
        with place.open("rb") as file:
            content = file.read(4 * MAX_PLAN_CHARACTERS + 1)
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text" if isinstance(error, UnicodeError) else error
        raise PlanError(f"cannot read the plan {str(place)!r}: {reason}", cure="give the path of a plan file.") from None


def write_text(path: str | os.PathLike[str], text: str, *, what: str) -> None:
    """Write a whole file, then give it its name. Raises `UserInputError` saying why it cannot be written."""
    place = Path(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, place)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserInputError(
            f"cannot write the {what} to {str(place)!r}: {error.strerror}",
            cure="give the path of a file in a directory that can be written to.",
        ) from None
