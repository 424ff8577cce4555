"""One question that all ranks answer together, and an error that names the ranks when they are not in the same place.

In: what this rank is doing (a text) and a small JSON-able payload. Out: all ranks' payloads in rank order.
"""

from __future__ import annotations

from typing import Any

from rannc_backend.errors import CallsDifferError, OutOfStepError, PlainGradientError
from rannc_backend.runtime.step_counts import name_of
from rannc_backend.runtime.world import World


def agree(world: World, what: str, payload: Any = None, *, limit_seconds: float | None = None) -> list[Any]:
    """Every rank's ``payload``.

    Raises:
        CallsDifferError: some rank is doing something else; it names what each rank does.
        OutOfStepError: ranks have made different numbers of calls, backwards or optimizer steps until now.
        PlainGradientError: gradients from outside of compiled models were not the same on the ranks that hold a parameter.
        RanncError: the call failed on another rank; its ``failed_rank`` tells which.
        CommunicationError: a rank did not arrive within the limit.
    """
    world.monitor.begin_call()
    world.transport.check()
    counts = world.counts
    answers = world.control.allgather([what, counts.digest(), payload], what=what, limit_seconds=limit_seconds, kind="agreement")
    doings = [answer[0] for answer in answers]
    if len(set(doings)) > 1:
        raise CallsDifferError(value_by_rank=doings)
    if any(answer[1] != answers[0][1] or answer[1][-1] for answer in answers):
        details = world.control.allgather(counts.details(), what="counts of steps", limit_seconds=limit_seconds)
        counts.plain_gradients.clear()
        if differences := counts.differences(details):
            raise OutOfStepError(value_by_rank=differences)
        if key := counts.plain_difference(details):
            raise PlainGradientError(
                f"{name_of(key)!r} has gradients of computations outside of the compiled model that differ between the ranks"
            )
    return [answer[2] for answer in answers]
