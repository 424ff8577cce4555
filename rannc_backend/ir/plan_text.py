"""JSON text before and after it is a plan: what is refused unread, and how findings are told.

In: text of any kind. Out: nothing, or a `PlanError` that says where and what. Runs nothing from the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from rannc_backend.errors import PlanError

MAX_PLAN_CHARACTERS = 64 * 1024 * 1024
MAX_PLAN_DEPTH = 12  # a plan itself is 6 deep
_SHOWN_ERRORS = 3


def first_repeated(items: Iterable[Any]) -> Any:
    """The first item that was there before; None if there is none."""
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def check_shape_of_text(text: str, schema_version: int) -> None:
    """Refuse what no plan looks like before a parser builds it: too long, too deep, a key given twice,
    NaN.
    """
    if not isinstance(text, str):
        raise PlanError(f"a plan is text, not {type(text).__name__}")
    if len(text) > MAX_PLAN_CHARACTERS:
        raise PlanError(f"the plan has {len(text)} characters; at most {MAX_PLAN_CHARACTERS} are read")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        token = match.group()
        depth += 1 if token in "[{" else -1 if token in "]}" else 0
        if depth > MAX_PLAN_DEPTH:
            raise PlanError(
                f"the plan is nested deeper than {MAX_PLAN_DEPTH} levels at character {match.start()}"
            )
    try:
        value = json.loads(
            text, object_pairs_hook=_object_without_repeated_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise PlanError(
            f"the plan is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the plan is not valid: {error}") from None
    if not isinstance(value, dict):
        raise PlanError(f"a plan is a JSON object, not {type(value).__name__}")
    version = value.get("schema_version")
    if version != schema_version or isinstance(version, bool):
        raise PlanError(
            f"the plan has schema version {version!r}; this release reads version {schema_version}"
        )


def _object_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = first_repeated(key for key, _ in pairs)
    if repeated is not None:
        raise ValueError(f"key {repeated!r} is given twice in one object")
    return dict(pairs)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number a plan may hold")


def describe_findings(error: ValidationError) -> str:
    """`stages[1].ranks[0]: what is wrong` for the first few findings of pydantic."""
    findings = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for finding in findings[:_SHOWN_ERRORS]:
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in finding["loc"]
        ).lstrip(".")
        message = finding["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    if len(findings) > _SHOWN_ERRORS:
        lines.append(f"and {len(findings) - _SHOWN_ERRORS} more")
    return "the plan is not valid: " + "; ".join(lines)
