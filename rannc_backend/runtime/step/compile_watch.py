"""Compilation on several ranks that does not look like a hang: who compiles what, and who is still at it.

In: what this rank compiles. Out: after some seconds a log line per rank, then every half minute one line with
the ranks that are not done; rank 0 speaks. It learns the others' state from the monitor, which hears their
phases anyway. The wait for the slowest has a limit of its own (`compile_timeout_seconds`); the error at its
end names the ranks that are missing and what they are in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from rannc_backend.log.progress import duration_text
from rannc_backend.runtime.world import RankState, World

logger = logging.getLogger(__name__)

FIRST_SECONDS = 5.0
PERIOD_SECONDS = 30.0
COMPILING = "compiling "
_MAX_LINES = 16
_MAX_NAMES = 8


class CompileWatch:
    """A context around a compilation and the wait for the others'.

    Args:
        what: what this rank compiles, as "stage 1 of graph 0 (loss)".
        log: where lines go.
    """

    def __init__(
        self,
        world: World,
        what: str,
        *,
        log: Callable[[str], None] = logger.info,
        first_seconds: float = FIRST_SECONDS,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._world = world
        self._what = what
        self._log = log
        self._first_seconds = first_seconds
        self._period_seconds = period_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CompileWatch:
        self._world.monitor.phase(COMPILING + self._what)
        if self._world.rank == 0:
            self._thread = threading.Thread(target=self._run, name="rannc-compile-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread may be asking the monitor, which takes a second or two; it says nothing any more.
        self._ended.set()

    def done(self) -> None:
        """This rank has compiled its part, and waits for the others."""
        self._world.monitor.phase(f"compiled {self._what}, waiting for the others")

    def _run(self) -> None:
        started = time.monotonic()
        wait_seconds, say = self._first_seconds, self._who_does_what
        while not self._ended.wait(wait_seconds):
            states = self._world.monitor.survey()
            lines = say(states, time.monotonic() - started)
            if self._ended.is_set():
                return
            for line in lines:
                self._log(line)
            wait_seconds, say = self._period_seconds, self._who_is_left

    def _who_does_what(self, states: Sequence[RankState], seconds: float) -> list[str]:
        if not states:
            return [f"{COMPILING}{self._what}"]
        lines = [f"rank {state.rank}: {state.phase}" for state in states[:_MAX_LINES]]
        return lines + ([f"and {len(states) - _MAX_LINES} ranks more"] if len(states) > _MAX_LINES else [])

    def _who_is_left(self, states: Sequence[RankState], seconds: float) -> list[str]:
        spent = duration_text(seconds)
        if not states:
            return [f"still {COMPILING}{self._what}, {spent} so far"]
        left = [state for state in states if state.phase.startswith(COMPILING)]
        others = [state for state in states if not state.phase.startswith(("compiled", COMPILING))]
        num_done = len(states) - len(left) - len(others)
        parts = [f"{num_done} of {len(states)} ranks have compiled"] if left or others else []
        if left:
            parts.append(f"still compiling: {_names(left)}")
        if others:
            parts.append(f"not there yet: {_names(others)}")
        return [f"{'; '.join(parts)}; {spent} so far"] if parts else []


def _names(states: Sequence[RankState]) -> str:
    shown = [f"rank {state.rank} ({state.phase.removeprefix(COMPILING)})" for state in states[:_MAX_NAMES]]
    return ", ".join(shown) + (f" and {len(states) - _MAX_NAMES} more" if len(states) > _MAX_NAMES else "")
