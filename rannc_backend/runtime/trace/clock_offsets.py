"""How far each rank's clock is ahead of rank 0's, with a bound of the error that holds whatever the network
does.

In: rounds of an all-gather. Out: offsets in seconds.

Each rank notes its clock before (a) and after (b) a round. Nobody leaves a round before all have entered it,
so for rank r with offset d = clock of r - clock of rank 0 at the same moment: a_r - d <= b_0 and a_0 <= b_r -
d, hence a_r - b_0 <= d <= b_r - a_0. Several rounds narrow the interval; its middle is the estimate, half its
length the error. Measurements at different times narrow it further: an interval is good for other times too,
when it is widened by as much as the clocks can have drifted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rannc_backend.runtime.world import World

NUM_ROUNDS = 8
MAX_KEPT = 16
# Seconds per second; quartz clocks stay below a tenth of it, and those that a time service steers below a
# half.
MAX_DRIFT = 1e-3


@dataclass(frozen=True, slots=True)
class Offset:
    """``seconds`` ahead of rank 0, at most ``error_seconds`` off, when this rank's clock said ``at``."""

    at: float
    seconds: float
    error_seconds: float


@dataclass(slots=True)
class ClockOffsets:
    """Offsets of this rank, measured from time to time."""

    found: list[Offset] = field(default_factory=list)

    def measure(self, world: World) -> None:
        """Measure once more. Collective."""
        own: list[tuple[float, float]] = []
        zeros: list[list[float]] = []
        last = [0.0, 0.0]
        for _ in range(NUM_ROUNDS + 1):
            before = time.perf_counter()
            # The clock after a round is known one round later.
            gathered = world.control.allgather(last, what="clocks")
            last = [before, time.perf_counter()]
            own.append((last[0], last[1]))
            zeros.append(gathered[0])
        found = offset_of(own[:-1], zeros[1:])
        # Rank 0 knows its distance from itself.
        self.found.append(found if world.rank else Offset(found.at, 0.0, 0.0))
        del self.found[:-MAX_KEPT]

    def at(self, seconds: float) -> Offset:
        """The offset when this rank's clock said ``seconds``: what all measurements agree on, each the wider
        the longer ago.
        """
        if not self.found:
            return Offset(seconds, 0.0, 0.0)
        spans = [(item, item.error_seconds + MAX_DRIFT * abs(seconds - item.at)) for item in self.found]
        least = max(item.seconds - width for item, width in spans)
        most = min(item.seconds + width for item, width in spans)
        return Offset(seconds, (least + most) / 2, abs(most - least) / 2)

    @property
    def error_seconds(self) -> float:
        """The largest error at the times of measurement."""
        return max((self.at(item.at).error_seconds for item in self.found), default=0.0)


def offset_of(own: Sequence[tuple[float, float]], zeros: Sequence[Sequence[float]]) -> Offset:
    """The offset from the clocks of this rank and of rank 0 around the same rounds."""
    least = max(before - zero[1] for (before, _), zero in zip(own, zeros, strict=True))
    most = min(after - zero[0] for (_, after), zero in zip(own, zeros, strict=True))
    return Offset(at=own[-1][1], seconds=(least + most) / 2, error_seconds=max(0.0, (most - least) / 2))
