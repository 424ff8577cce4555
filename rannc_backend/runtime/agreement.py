"""One question that all ranks answer together, numbers of tensors to ask about, and calls that fail on all ranks where they
fail on one.

In: what this rank is doing (a text) and a small JSON-able payload. Out: all ranks' payloads in rank order.

A call that raises on one rank before the ranks exchange anything raises the same error on all of them, naming
that rank; where it raises in the midst of messages, which the others would wait for, the job ends with the
cause. So a script that catches an exception and goes on with the next batch goes on alike on all ranks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rannc_backend.errors import (
    CallsDifferError,
    CommunicationError,
    OutOfStepError,
    PlainGradientError,
    RankFailedError,
    UnsynchronizedGradientError,
)
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.step_counts import name_of
from rannc_backend.runtime.world import World

logger = logging.getLogger(__name__)


def agree(world: World, what: str, payload: Any = None, *, limit_seconds: float | None = None) -> list[Any]:
    """Every rank's ``payload``.

    Raises:
        CallsDifferError: some rank is doing something else; it names what each rank does.
        OutOfStepError: ranks have made different numbers of calls, backwards or optimizer steps until now.
        PlainGradientError: gradients from outside of compiled models were not the same on the ranks that hold
        a parameter.
        UnsynchronizedGradientError: parameters outside of compiled models are not the same on all ranks any more.
        RanncError: the call failed on another rank; its ``failed_rank`` tells which.
        CommunicationError: a rank did not arrive within the limit.
    """
    world.monitor.begin_call()
    world.transport.check()
    counts = world.counts
    answers = world.control.allgather(
        [what, counts.digest(), payload], what=what, limit_seconds=limit_seconds, kind="agreement"
    )
    doings = [answer[0] for answer in answers]
    if len(set(doings)) > 1:
        raise CallsDifferError(value_by_rank=doings)
    if any(answer[1] != answers[0][1] or answer[1][-1] for answer in answers):
        details = world.control.allgather(
            counts.details(), what="counts of steps", limit_seconds=limit_seconds
        )
        counts.plain_gradients.clear()
        differences, are_settings = counts.differences(details)
        if differences:
            raise OutOfStepError(value_by_rank=differences, settings=are_settings)
        if found := counts.outside_difference(details, logger.warning if world.rank == 0 else logger.debug):
            raise UnsynchronizedGradientError(*found, has_updated=True)
        if key := counts.plain_difference(details):
            raise PlainGradientError(
                f"{name_of(key)!r} has gradients of computations outside of the compiled model that differ "
                "between the ranks"
            )
    return [answer[2] for answer in answers]


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
    """Around messages: a failure within it cannot be told, as the others may wait for something else than
    this rank's word.
    """
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
        world.control.report_failure(error)


def is_shared(error: BaseException) -> bool:
    """Whether the other ranks raise this error, or the one that it tells of, as well."""
    return getattr(error, "failed_rank", None) is not None or isinstance(
        error, (CallsDifferError, OutOfStepError)
    )


def digest(tensor: torch.Tensor) -> list[float]:
    """Number of elements, the first one, and a weighted sum."""
    flat = plain_memory(tensor.detach()).reshape(-1)
    if flat.numel() == 0:
        return [0.0]
    values = flat.double() if not flat.is_complex() else torch.view_as_real(flat).reshape(-1).double()
    weights = torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device=values.device)
    # JSON has neither NaN nor infinities.
    pair = torch.stack([values[0], (values * weights).nan_to_num().sum()]).nan_to_num(
        nan=0.0, posinf=1e300, neginf=-1e300
    )
    return [float(values.numel()), *pair.tolist()]


@dataclass(slots=True)
class Digests:
    """Digests by name of the input; remembers the last tensor of each."""

    _known: dict[str, tuple[weakref.ref[torch.Tensor], int, list[float]]] = field(default_factory=dict)

    def of(self, name: str, tensor: torch.Tensor) -> list[float]:
        """`digest` of ``tensor``, read again only if this is another tensor than last time or it was written
        since.
        """
        known = self._known.get(name)
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        result = digest(tensor)
        self._known[name] = (weakref.ref(tensor), tensor._version, result)
        return result
