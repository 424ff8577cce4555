"""Refuses models that Dynamo could not trace as one graph, and says why and where.

In: a `DynamoCall` and the Dynamo graph. Out: nothing, or `GraphBreakError` / `DataDependentControlFlowError`. Terms: a *graph
break* is a statement that Dynamo cannot trace: it compiles what came before, runs the statement in Python, and goes on with a
*resumed* frame.
"""

from __future__ import annotations

import traceback
from typing import Any

from torch import fx

from rannc_backend.capture_dynamo import DynamoCall, RestartReason, break_reasons_since, latest_break, library_log_methods
from rannc_backend.errors import DataDependentControlFlowError, GraphBreakError, user_location

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
    where = call.skipped_functions[0] if call.skipped_functions else f"{call.code.co_filename}:{call.code.co_firstlineno}"
    raise graph_break_error(reason or (known[-1] if known else "Dynamo could not trace the whole function"), user_location(stack) or where)


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
    # After a break from which it cannot resume, Dynamo goes back to a statement before it and only says "step_unsupported".
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
    """The headline and the explanation of Dynamo's long texts, without hints that hold for other backends only."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    raised = [line for line in lines if line.startswith(_RAISED)]
    if raised:
        return "the model raises " + raised[0].removeprefix(_RAISED).strip()
    kept = [line for line in lines if not line.startswith(("Hint:", "Developer debug context:", "For more details"))]
    return " ".join(kept[:2]) or "unknown reason"
