"""Plans as files.

In: a path. Out: a checked `Plan`, or a file that appears at once or not at all. Nothing in a file is ever
run. Reading a plan that does not exist, is a directory, is no UTF-8 text, is too long, or is no plan is a
`PlanError` that names the file.
"""

from __future__ import annotations

import os

from rannc_backend.errors import PlanError, located
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_text import MAX_PLAN_CHARACTERS
from rannc_backend.settings import user_files
from rannc_backend.settings.user_files import UserFile


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, checked in itself; `ir.plan.check_against` checks it against a model."""
    return plan_in(read_plan_text(path), path)


def plan_in(text: str, path: str | os.PathLike[str], *, named_by: str = "") -> Plan:
    """The plan that a file's text is. Raises PlanError."""
    try:
        return Plan.from_json(text)
    except PlanError as error:
        place = f"{os.fspath(path)} (from {named_by})" if named_by else os.fspath(path)
        raise located(error, place) from None


def read_plan_text(path: str | os.PathLike[str], *, named_by: str = "") -> str:
    """The text of a plan file."""
    file = UserFile(
        path=path, what="plan", named_by=named_by, error=PlanError, cure="give the path of a plan file."
    )
    return user_files.read_text(file, 4 * MAX_PLAN_CHARACTERS)


def write_text(path: str | os.PathLike[str], text: str, *, what: str, named_by: str = "") -> None:
    """Write a whole file, then give it its name. Raises `UserInputError` saying why it cannot be written."""
    user_files.write_text(output_file(path, what=what, named_by=named_by), text)


def output_file(path: str | os.PathLike[str], *, what: str, named_by: str = "") -> UserFile:
    """A file to be written."""
    return UserFile(
        path=path,
        what=what,
        named_by=named_by,
        cure="give the path of a file in a directory that can be written to.",
    )
