"""What the examples print: who this process is, the plan once, and speed and loss as they train.

In: the launcher's environment, the plan file that the backend saves, numbers of each step. Out: lines on rank 0's stdout.
Nothing here is needed to train.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
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


def new_plan_file() -> str:
    """A path at which the backend may save its plan."""
    return os.path.join(tempfile.mkdtemp(prefix="plan-"), "plan.json")


def print_plan(path: str) -> None:
    """The plan as a small table: a line per stage with its modules, ranks, predicted seconds and bytes."""
    plan = json.loads(Path(path).read_text())
    print(
        f"plan: {len(plan['stages'])} stages, {plan['num_micro_batches']} micro-batches, {plan['schedule']}, "
        f"predicted {plan['predicted_step_seconds']:.4f} s per step"
    )
    for stage in plan["stages"]:
        predicted = stage["predicted"]
        ranks = ",".join(str(rank) for rank in stage["ranks"])
        print(
            f"  stage {stage['index']} on ranks {ranks}: {_span(stage['modules'])}, "
            f"{predicted['parameter_bytes'] / 1e6:.1f} MB of parameters, peak {predicted['peak_bytes'] / 1e6:.1f} MB, "
            f"forward {predicted['forward_seconds'] * 1e3:.2f} ms, backward {predicted['backward_seconds'] * 1e3:.2f} ms"
        )


def _span(modules: Sequence[str]) -> str:
    named = [name for name in modules if name]
    return f"{named[0]} .. {named[-1]}" if named else "no modules"


class Progress:
    """Prints the plan after the first step, then loss and speed every few steps; on rank 0 only.

    Members:
        losses: of all steps so far.
    """

    def __init__(self, *, what: str, plan_file: str, every: int) -> None:
        self.losses: list[float] = []
        self._what, self._plan_file, self._every = what, plan_file, every
        self._speaks = rank_and_world()[0] == 0
        self._since = time.perf_counter()
        self._done = 0

    def step(self, loss: float, count: int) -> None:
        """One step over `count` things on all ranks together."""
        self.losses.append(loss)
        number = len(self.losses)
        if number == 1:
            if self._speaks and Path(self._plan_file).exists():
                print_plan(self._plan_file)
                print(f"first step, with capture, planning and compilation: {time.perf_counter() - self._since:.1f} s")
            self._say(f"step 1: loss {loss:.4f}")
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
        self._say(f"done: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps{text}")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)
