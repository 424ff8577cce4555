"""The option sync_allreduce: no all-reduce runs beside a backward.

In: what starts an all-reduce. Out: the same, put off: all-reduces that are asked for while backward runs
start together at the first wait, which comes after the rank's last backward, in the order in which they were
asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rannc_backend.runtime.gradients.buckets import StartReduce, Waitable


@dataclass(slots=True)
class DeferredReductions:
    """Called as what it puts off."""

    start: StartReduce
    _asked: list[_LateWork] = field(default_factory=list)

    def __call__(
        self, buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()
    ) -> _LateWork:
        """Note an all-reduce."""
        work = _LateWork(owner=self, buffer=buffer, ranks=ranks, takers=takers)
        self._asked.append(work)
        return work

    def start_all(self) -> None:
        """Start all that are asked for. None is waited for before all have started: ranks may have them in
        different orders.
        """
        asked, self._asked = self._asked, []
        for work in asked:
            work.started = self.start(work.buffer, work.ranks, work.takers)


@dataclass(slots=True, kw_only=True)
class _LateWork:
    owner: DeferredReductions
    buffer: torch.Tensor
    ranks: tuple[int, ...]
    takers: tuple[int, ...]
    started: Waitable | None = None

    def wait(self) -> None:
        """Block until the sum is there."""
        self.owner.start_all()
        assert self.started is not None, "an all-reduce that was not asked for"
        self.started.wait()
