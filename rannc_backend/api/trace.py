"""The event trace as a training script calls it: written at the end of the process, or now.

In: what has been traced under options={"trace_events": True}. Out: a file for Perfetto. docs/tracing.md has
the rules.
"""

from __future__ import annotations

from pathlib import Path

from rannc_backend.errors import RanncError, UserInputError, rebuild_error
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.trace.trace_file import merge, write_part
from rannc_backend.session_registry import REGISTRY


def write_event_trace() -> Path:
    """Writes the events of all ranks so far to ``event_trace_file``. Collective.

    Tracing continues; the file is written again when the process ends.

    Returns:
        Path of the file, which rank 0 has written on return.

    Raises:
        UserInputError: No model is compiled with ``trace_events``, or the file cannot be written.
    """
    world, trace = bootstrap.start(), REGISTRY.trace
    world.monitor.phase("writing the event trace")
    if trace is None:
        raise UserInputError(
            "nothing has been traced",
            cure='compile with options={"trace_events": True} (RANNC_TRACE_EVENTS=1) and call the model.',
        )
    if world.size > 1:
        trace.offsets.measure(world)
    problem: RanncError | None = None
    try:
        write_part(trace)
    except RanncError as error:
        problem = error
    for rank, text in enumerate(agree(world, "write_event_trace", "" if problem is None else str(problem))):
        if text:
            raise problem or rebuild_error("UserInputError", f"rank {rank}: {text}")
    if world.rank == 0:
        merge(trace, range(world.size))
    world.control.barrier(what="the end of write_event_trace")
    world.monitor.phase("between steps")
    return Path(trace.file)
