"""Tells what is done between a model and its first step, and how long each part took.

In: named steps as contexts. Out: a `Step` for each that is done, to whoever listens: a log line, a terminal,
a benchmark. Terms. Steps: capture, analysis, blocks, prices, search, compile, ...; one that fails is not
told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is done: what came out of it, in words, and how long it took."""

    name: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.detail}, {self.seconds:.1f} s"
            if self.detail
            else f"{self.name}: {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimer:
    """Shows which step runs, for as long as the context that `show` gives, and tells of each that is done."""

    log: Callable[[Step], None] = lambda step: None
    show: Callable[[str], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Run a step; what is put into the list becomes its detail."""
        details: list[str] = []
        started = time.monotonic()
        with self.show(name):
            yield details
        self.log(Step(name=name, detail=", ".join(details), seconds=time.monotonic() - started))


def log_step_timer(*, verbose: bool) -> StepTimer:
    """Tells the log: rank 0 is heard with the option verbose, every rank at level debug."""
    level = logging.INFO if verbose else logging.DEBUG
    return StepTimer(log=lambda step: logger.log(level, "%s", step))
