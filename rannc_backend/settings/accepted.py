"""What each option accepts, in words and as a list.

In: the name of an item of `Config`. Out: texts for errors, documents and the command line.
"""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from rannc_backend.settings import choices as possible
from rannc_backend.settings.options import Config


def choices(item: str) -> tuple[object, ...]:
    """The values of an item that accepts no others than some names; () for every other item."""
    if item == "schedule":
        return ("auto", *possible.SCHEDULES)
    annotation = Config.model_fields[item].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def named_values(item: str) -> tuple[str, ...]:
    """The names that an item accepts, alone or beside numbers."""
    extra = Config.model_fields[item].json_schema_extra
    names = extra.get("names") if isinstance(extra, dict) else None
    return tuple(str(name) for name in (names if isinstance(names, list) else choices(item)))


def accepted_values(item: str) -> str:
    """What an item accepts, in words: "an integer, at least 0"."""
    field = Config.model_fields[item]
    if isinstance(field.json_schema_extra, dict) and "accepts" in field.json_schema_extra:
        return str(field.json_schema_extra["accepts"])
    annotation = field.annotation
    if names := choices(item):
        return "one of " + ", ".join(map(repr, names))
    if annotation is bool:
        return "True or False (in the file: true or false)"
    if annotation is str:
        return "a string"
    words = ["an integer" if annotation is int else "a finite number"]
    for constraint in field.metadata:
        if isinstance(constraint, Ge):
            words.append(f"at least {constraint.ge}")
        elif isinstance(constraint, Gt):
            words.append(f"above {constraint.gt}")
        elif isinstance(constraint, Le):
            words.append(f"at most {constraint.le}")
        elif isinstance(constraint, Lt):
            words.append(f"below {constraint.lt}")
    return ", ".join(words)
