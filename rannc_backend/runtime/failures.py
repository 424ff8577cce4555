"""A call that fails on one rank fails on all of them, or the job ends.

In: a call that all ranks make together. Out: where it raises on one rank before the ranks exchange anything, the same error on all of
them, naming that rank; where it raises in the midst of messages, which the others would wait for, the end of the job with the cause.
So a script that catches an exception and goes on with the next batch goes on alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rannc_backend.errors import CallsDifferError, CommunicationError, OutOfStepError, RankFailedError
from rannc_backend.runtime.world import World


@contextmanager
def failing_together(world: World, what: str) -> Iterator[None]:
    """Around a call of ``what`` that all ranks make; see the module docstring."""
    try:
        yield
    except Exception as error:
        world.counts.note_failure(what, error)
        share_failure(world, error)
        raise


@contextmanager
def exchanging(world: World) -> Iterator[None]:
    """Around messages: a failure within it cannot be told, as the others may wait for something else than this rank's word."""
    before, world.counts.is_exchanging = world.counts.is_exchanging, True
    yield
    # Left as it is where an exception passes: for `failing_together`.
    world.counts.is_exchanging = before


def share_failure(world: World, error: Exception) -> None:
    """Let the other ranks know that this one raises ``error`` in its call."""
    if world.size == 1 or is_shared(error):
        return
    if world.counts.is_exchanging or isinstance(error, (CommunicationError, RankFailedError)):
        world.monitor.report_error(error)
    else:
        world.control.tell_failure(error)


def is_shared(error: BaseException) -> bool:
    """Whether the other ranks raise this error, or the one that it tells of, as well."""
    return getattr(error, "failed_rank", None) is not None or isinstance(error, (CallsDifferError, OutOfStepError))
