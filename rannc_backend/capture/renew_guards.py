"""Brings Dynamo's guards up to date, after the model's parameters have moved: without that the second step
would compile again.

In: what Dynamo gave to the backend, called from there. Out: guards that expect the parameters' new strides;
where more has changed (their device, say), Dynamo's restart, as guards are made from the last trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import fx

from rannc_backend.capture.dynamo import find_dynamo_call, guard_as_they_are, previous_restart, restart_trace
from rannc_backend.capture.first_trace import begun_trace
from rannc_backend.capture.graph import CapturedGraph


def renew_guards(
    captured: CapturedGraph, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> None:
    """Let the compiled frame serve the model's parameters as they are now. Raises what `trace_again` raises
    where that takes a trace.
    """
    positions = [item.position for item in captured.inputs if item.kind in ("parameter", "buffer")]
    if not guard_as_they_are(find_dynamo_call(), graph_module, example_inputs, positions):
        trace_again(captured)


def trace_again(captured: CapturedGraph) -> NoReturn:
    """Raise the exception that Dynamo answers with another trace, under the settings of the last one.

    If that gives the same graph, `capture_or_restart` returns ``captured`` without tracing to ATen again.
    """
    call = find_dynamo_call()
    last = previous_restart(call) or begun_trace()
    assert last is not None, "the first trace has no symbolic batch size yet"
    restart_trace(call, last.batch_tensors, hint=last.hint, finished=captured)
