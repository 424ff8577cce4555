"""What the stage search tells at level debug: the logger that RaNNC calls DPStaging.

In: cells as they are opened, plans as they are priced. Out: a line per opened cell and, at the end, one per
number of stages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rannc_backend.planner.search.bounds import Cell


@dataclass(slots=True)
class _Tally:
    """Of one number of stages."""

    opened: set[Cell] = field(default_factory=set)
    num_candidates: int = 0
    best_seconds: float = math.inf


@dataclass(slots=True)
class SearchLog:
    """Counts by number of stages; does nothing where nobody listens."""

    logger: logging.Logger
    _tallies: dict[int, _Tally] = field(default_factory=dict)

    @property
    def listens(self) -> bool:
        """Whether anybody listens."""
        return self.logger.isEnabledFor(logging.DEBUG)

    def opened(self, cell: Cell, *, bound: float, num_candidates: int, best: float) -> None:
        """A cell was walked through: no plan of it takes less than `bound` seconds. `best`: the best step so
        far, of all cells.
        """
        if not self.listens:
            return
        tally = self._tallies.setdefault(cell.num_stages, _Tally())
        tally.opened.add(cell)
        tally.num_candidates += num_candidates
        self.logger.debug(
            "%d stages, %d micro-batches, %s, %s: bound %s, %d candidates; best step so far %s",
            cell.num_stages,
            cell.num_micro_batches,
            cell.schedule,
            cell.placement,
            _text(bound),
            num_candidates,
            _text(best),
        )

    def priced(self, num_stages: int, seconds: float) -> None:
        """The fastest of the plans that were simulated just now."""
        if self.listens:
            tally = self._tallies.setdefault(num_stages, _Tally())
            tally.best_seconds = min(tally.best_seconds, seconds)

    def report(self, cells_of: Iterable[tuple[float, Cell]]) -> None:
        """One line per number of stages. `cells_of`: the cells that could hold a plan, with their bounds."""
        if not self.listens:
            return
        bounds: dict[int, dict[Cell, float]] = {}
        for bound, cell in cells_of:
            bounds.setdefault(cell.num_stages, {})[cell] = bound
        for num_stages in sorted({*bounds, *self._tallies}):
            cells, tally = bounds.get(num_stages, {}), self._tallies.get(num_stages, _Tally())
            self.logger.debug(
                "%d stages: best step %s, least bound %s; %d candidates in %d cells, %d more pruned by their "
                "bounds",
                num_stages,
                _text(tally.best_seconds),
                _text(min(cells.values(), default=math.inf)),
                tally.num_candidates,
                len(tally.opened),
                len(cells.keys() - tally.opened),
            )


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if math.isfinite(seconds) else "none"
