"""Every error of tracing, planning and compiling a model as one of this package, with the line that caused
it; and the refusal of models that Dynamo could not trace as one graph.

In: an exception that torch or this package raised between Dynamo's graph and a compiled stage, or the reason
of a graph break. Out: an error with the user's line: that of the operator at hand, or of the call of the
model. Seen on torch 2.11.0 and 2.13.0; see tests/unit/rannc_backend/capture/test_errors.py.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis, TorchDynamoException, Unsupported

from rannc_backend.capture.dynamo import (
    DynamoCall,
    RestartReason,
    break_reasons_since,
    latest_break,
    library_log_methods,
)
from rannc_backend.errors import (
    DataDependentControlFlowError,
    GraphBreakError,
    InternalError,
    ModelError,
    RanncError,
    TraceError,
    is_of_user,
    located,
    user_location,
)

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
    """What is raised within comes out as an error of this package; what Dynamo answers with another trace
    stays.

    For traces, plans and compilations: what a model's own operators raise on data when it runs is not for
    here.
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
    """The error to raise in the place of one of Dynamo's; that of the backend itself, where Dynamo has only
    wrapped it.
    """
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
    """The error of this package for one that torch, or this backend, raised about a model; whose it is, the
    place tells.
    """
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
    """The user's line of the operator that the failing code was about: of the innermost frame that holds
    one.
    """
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


_LOGGING = "logging.Logger method not supported"
_RAISED = "Developer debug context: raised exception "
_DATA_DEPENDENT = (
    "generic_jump",
    "data-dependent",
    "data dependent",
    "dynamic shape operator",
    "tensor.item()",
    ".tolist()",
    "unbacked",
    "datadependent",
)


def is_partial(graph_module: fx.GraphModule) -> bool:
    """Whether the graph ends at a statement that Dynamo cannot trace."""
    return _break_of(graph_module) is not None


def refuse_resumed_frame(call: DynamoCall) -> None:
    """Raise if Dynamo gave up an outer function, so that this frame is only a part of what was compiled.

    That happens at a break before the first operator, in a nested call, or inside of a `with` or `try`.
    """
    if not call.is_resumed and not call.skipped_functions:
        return
    known = break_reasons_since(None)
    reason, stack = latest_break()
    where = (
        call.skipped_functions[0]
        if call.skipped_functions
        else f"{call.code.co_filename}:{call.code.co_firstlineno}"
    )
    raise graph_break_error(
        reason or (known[-1] if known else "Dynamo could not trace the whole function"),
        user_location(stack) or where,
    )


def refuse_graph_break(graph_module: fx.GraphModule, restart: RestartReason | None) -> None:
    """Raise if this graph ends at a statement that Dynamo cannot trace."""
    reason = _break_of(graph_module)
    if reason is not None:
        location = user_location("".join(traceback.format_list(list(reason.user_stack))))
        text, stack = latest_break()
        texts = _reasons(graph_module, restart)
        raise graph_break_error(texts[-1], user_location(stack) if texts[-1] == text else location)


def _break_of(graph_module: fx.GraphModule) -> Any | None:
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return reason if reason is not None and reason.graph_break else None


def _reasons(graph_module: fx.GraphModule, restart: RestartReason | None) -> tuple[str, ...]:
    reason = _break_of(graph_module)
    if reason is None:
        return ()
    # After a break from which it cannot resume, Dynamo goes back to a statement before it and only says
    # "step_unsupported".
    if "step_unsupported" not in reason.reason:
        return (reason.reason,)
    return break_reasons_since(restart) or (reason.reason,)


def graph_break_error(reason: str, location: str) -> GraphBreakError:
    """The user's error for Dynamo's reason of a break and the user's line, "" if unknown."""
    text = _shortened(reason)
    if any(sign in reason.lower() for sign in _DATA_DEPENDENT):
        return DataDependentControlFlowError(text, location=location)
    if _LOGGING in reason:
        cure = "take the call of the logger out of forward, or guard it with `if not torch.compiler.is_compiling():`."
        if any(f".{name}," in reason for name in library_log_methods()):
            cure = "call torch.compile after the library that defines this logging method was imported."
        return GraphBreakError(text, location=location, cure=cure)
    if "__reduce_ex__" in reason:
        cure = "use torch 2.13, which can trace copies of such objects. Of a Hugging Face model's cache: call it with use_cache=False."
        return GraphBreakError(text, location=location, cure=cure)
    if "LSTM" in reason:
        cure = "let Dynamo trace recurrent layers: set torch._dynamo.config.allow_rnn = True before torch.compile."
        return GraphBreakError(text, location=location, cure=cure)
    return GraphBreakError(text, location=location)


def _shortened(reason: str) -> str:
    """The headline and the explanation of Dynamo's long texts, without hints that hold for other backends
    only.
    """
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    raised = [line for line in lines if line.startswith(_RAISED)]
    if raised:
        return "the model raises " + raised[0].removeprefix(_RAISED).strip()
    kept = [
        line
        for line in lines
        if not line.startswith(("Hint:", "Developer debug context:", "For more details"))
    ]
    return " ".join(kept[:2]) or "unknown reason"
