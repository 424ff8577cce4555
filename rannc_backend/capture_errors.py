"""Every error of tracing, planning and compiling a model as one of this package, with the line that caused it.

In: an exception that has come out of a compiled call, of torch or of this backend. Out: one of `rannc_backend.errors` with the innermost
line of the user's, or of a model library's, code that caused it; the exception itself is its cause. Where nothing tells a line of the
model, it is the line that calls it. Seen on torch 2.11.0 and 2.13.0; see tests/unit/rannc_backend/test_capture_errors.py.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis, TorchDynamoException, Unsupported

from rannc_backend.capture_breaks import graph_break_error
from rannc_backend.errors import InternalError, ModelError, RanncError, TraceError, is_of_user, located, user_location

_FROM_USER_CODE = "from user code:"
_FAILED_OPERATOR = re.compile(
    r"call_\w+ (?:<[^>]*? )?(?P<name>\w+)(?: at 0x\w+)?>?\(.*?"
    r"got (?P<error>\w+)\((?P<quote>[\"'])(?P<reason>.*?)(?P=quote)\)\s*(?:\n|$)",
    re.DOTALL,
)
_NOISE = ("Set TORCHDYNAMO_VERBOSE", "For more details", "Hint:", "Developer debug context", _FROM_USER_CODE)
#: What fx adds to the error of an operator, the user's line among it.
_WHILE_EXECUTING = "While executing "
_OWN_PACKAGE = __name__.partition(".")[0]


@contextmanager
def own_errors_only() -> Iterator[None]:
    """What is raised within comes out as an error of this package; what Dynamo answers with another trace stays.

    For traces, plans and compilations: what a model's own operators raise on data when it runs is not for here.
    """
    try:
        yield
    except (RestartAnalysis, MemoryError, torch.OutOfMemoryError):
        raise
    except RanncError as error:
        if isinstance(error, ModelError) and not error.location:
            raise located(error, line_of_call()) from error.__cause__
        raise
    except Exception as error:
        raise explained(error) from error


def own_error(error: BaseException) -> RanncError | None:
    """The error to raise in the place of one of Dynamo's; that of the backend itself, where Dynamo has only wrapped it."""
    if not isinstance(error, TorchDynamoException):
        return None
    cause: BaseException = error
    if isinstance(error, BackendCompilerFailed):
        cause = error.inner_exception
    if isinstance(cause, RanncError):
        return cause
    if isinstance(error, Unsupported):
        return graph_break_error(str(error), user_location_of(error) or line_of_call())
    return explained(cause, user_location_of(error))


def explained(error: BaseException, location: str = "") -> RanncError:
    """The error of this package for one that torch, or this backend, raised about a model; whose it is, the place tells."""
    location = location or _line_of_node(error.__traceback__) or user_location_of(error) or line_of_call()
    is_ours = _package(_innermost(error.__traceback__)) == _OWN_PACKAGE
    return (InternalError if is_ours else TraceError)(_summary(error), location=location)


def user_location_of(error: BaseException) -> str:
    """The innermost line of the user, or of a model library, that Dynamo was at; "" if it does not tell."""
    stack = getattr(error, "real_stack", None)
    found = user_location("".join(traceback.format_list(list(stack)))) if stack else ""
    return found or user_location(str(error).rpartition(_FROM_USER_CODE)[2])


def line_of_call() -> str:
    """The line outside of torch and of this package that runs now: the user's call of the compiled model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _package(frame) != _OWN_PACKAGE and is_of_user(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return ""


def _line_of_node(trace: TracebackType | None) -> str:
    """The user's line of the operator that the failing code was about: of the innermost frame that holds one."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            if isinstance(value, fx.Node):
                found = user_location(value.meta.get("stack_trace"))
                if found:
                    return found
    return ""


def _innermost(trace: TracebackType | None) -> FrameType | None:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return frames[-1] if frames else None


def _package(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _summary(cause: BaseException) -> str:
    """Class and first lines of an error, without Dynamo's advice and without the node that fx adds."""
    text = str(cause).partition(_FROM_USER_CODE)[0].partition(_WHILE_EXECUTING)[0]
    if failed := _FAILED_OPERATOR.search(text):
        return f"{failed['name']}: {failed['error']}: {failed['reason']}"
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(_NOISE)]
    return f"{type(cause).__name__}: {' '.join(kept[:3])}".rstrip(": ")
