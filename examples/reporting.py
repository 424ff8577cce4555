"""What the examples print: speed and loss as they train, on rank 0. The plan is printed by the backend's own
log.

In: the launcher's environment, numbers of each step. Out: lines on rank 0's stdout. Nothing here is needed to
train.
"""

from __future__ import annotations

import os
import time
from typing import Any

_RANK_AND_WORLD = (
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are, as mpirun or torchrun says; (0, 1) without a launcher."""
    for rank, world in _RANK_AND_WORLD:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


class Progress:
    """Prints loss and speed every few steps; on rank 0 only.

    Members:
        losses: of all steps so far.
    """

    def __init__(self, *, what: str, every: int) -> None:
        self.losses: list[float] = []
        self._what, self._every = what, every
        self._speaks = rank_and_world()[0] == 0
        self._since = time.perf_counter()
        self._done = 0

    def step(self, loss: float, count: int) -> None:
        """One step over `count` things on all ranks together."""
        self.losses.append(loss)
        number = len(self.losses)
        if number == 1:
            seconds = time.perf_counter() - self._since
            self._say(f"step 1: loss {loss:.4f}, {seconds:.1f} s with capture, planning and compilation")
            self._since, self._done = time.perf_counter(), 0
            return
        self._done += count
        if number % self._every == 0:
            speed = self._done / (time.perf_counter() - self._since)
            self._say(f"step {number}: loss {loss:.4f}, {speed:,.0f} {self._what}/s")
            self._since, self._done = time.perf_counter(), 0

    def end(self, **results: Any) -> None:
        """The last line: first and last loss, and whatever else came out."""
        text = "".join(f", {name} {value}" for name, value in results.items())
        self._say(
            f"done: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps{text}"
        )

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)
