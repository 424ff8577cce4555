"""Asks Dynamo for one more trace of the frame, after the model's parameters have moved.

In: nothing; called from the backend. Out: Dynamo's restart. Guards are made from the last trace: without this one they would describe
parameters as they were before, and the second step would compile again.
"""

from __future__ import annotations

from typing import NoReturn

from rannc_backend.capture import CapturedGraph
from rannc_backend.capture_dynamo import find_dynamo_call, previous_restart, restart_trace


def trace_again(captured: CapturedGraph) -> NoReturn:
    """Raise the exception that Dynamo answers with another trace, under the settings of the last one.

    If that gives the same graph, `capture_or_restart` returns ``captured`` without tracing to ATen again.
    """
    call = find_dynamo_call()
    last = previous_restart(call)
    assert last is not None, "the first trace has no symbolic batch size yet"
    restart_trace(call, last.batch_tensors, hint=last.hint, finished=captured)
