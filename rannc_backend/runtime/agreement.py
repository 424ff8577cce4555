"""One question that all ranks answer together, and an error that names the ranks when they are not in the same place.

In: what this rank is doing (a text) and a small JSON-able payload. Out: all ranks' payloads in rank order.
"""

from __future__ import annotations

from typing import Any

from rannc_backend.errors import RanksDifferError
from rannc_backend.runtime.world import World


def agree(world: World, what: str, payload: Any = None, *, limit_seconds: float | None = None) -> list[Any]:
    """Every rank's ``payload``.

    Raises:
        RanksDifferError: some rank is doing something else; it names what each rank does.
        CommunicationError: a rank did not arrive within the limit.
    """
    world.monitor.begin_call()
    answers = world.control.allgather([what, payload], what=what, limit_seconds=limit_seconds)
    doings = [answer[0] for answer in answers]
    if len(set(doings)) > 1:
        raise RanksDifferError("calls at the same time", value_by_rank=doings)
    return [answer[1] for answer in answers]
