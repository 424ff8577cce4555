"""What Dynamo's own errors mean to a user of this backend.

In: an exception that has come out of a compiled call. Out: one of `rannc_backend.errors` with the innermost line of the user's, or of a
model library's, code that caused it; None for what is none of Dynamo's. Seen on torch 2.11.0 and 2.13.0; see
tests/unit/rannc_backend/test_capture_errors.py.
"""

from __future__ import annotations

import re
import traceback

from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported

from rannc_backend.capture_breaks import graph_break_error
from rannc_backend.errors import RanncError, TraceError, user_location

_FROM_USER_CODE = "from user code:"
_FAILED_OPERATOR = re.compile(
    r"call_\w+ (?:<[^>]*? )?(?P<name>\w+)(?: at 0x\w+)?>?\(.*?"
    r"got (?P<error>\w+)\((?P<quote>[\"'])(?P<reason>.*?)(?P=quote)\)\s*(?:\n|$)",
    re.DOTALL,
)
_NOISE = ("Set TORCHDYNAMO_VERBOSE", "For more details", "Hint:", "Developer debug context", _FROM_USER_CODE)


def own_error(error: BaseException) -> RanncError | None:
    """The error to raise in the place of one of Dynamo's; that of the backend itself, where Dynamo has only wrapped it."""
    if not isinstance(error, TorchDynamoException):
        return None
    cause: BaseException = error
    if isinstance(error, BackendCompilerFailed):
        cause = error.inner_exception
    if isinstance(cause, RanncError):
        return cause
    location = user_location_of(error)
    if isinstance(error, Unsupported):
        return graph_break_error(str(error), location)
    return TraceError(_summary(cause), location=location)


def user_location_of(error: BaseException) -> str:
    """The innermost line of the user, or of a model library, that Dynamo was at; "" if it does not tell."""
    stack = getattr(error, "real_stack", None)
    found = user_location("".join(traceback.format_list(list(stack)))) if stack else ""
    return found or user_location(str(error).rpartition(_FROM_USER_CODE)[2])


def _summary(cause: BaseException) -> str:
    """Class and first lines of an error, without Dynamo's advice."""
    text = str(cause).partition(_FROM_USER_CODE)[0]
    if failed := _FAILED_OPERATOR.search(text):
        return f"{failed['name']}: {failed['error']}: {failed['reason']}"
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(_NOISE)]
    return f"{type(cause).__name__}: {' '.join(kept[:3])}".rstrip(": ")
