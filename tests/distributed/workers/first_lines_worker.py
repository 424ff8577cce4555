"""Trains a small model over two ranks, and fails as it is told: `first_lines_worker.py
user|both|refused|option|memory|kill DIRECTORY`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    """Two layers and a loss; refused where it branches on its values."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.branches = branches

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(rows))
        if self.branches and hidden.sum() > 0:  # REFUSED
            hidden = 2 * hidden
        return self.second(hidden).square().mean()


def arrive(rank: int, directory: Path) -> None:
    """Wait for the other rank: a busy machine starts them seconds apart, and who is late says what nobody is
    there to have said.
    """
    (directory / f"arrived_{rank}").touch()
    limit = time.monotonic() + 60
    while not (directory / f"arrived_{1 - rank}").exists():
        if time.monotonic() > limit:
            sys.exit("the other rank did not arrive within 60 s")
        time.sleep(0.01)


def main(how: str, directory: Path) -> None:
    rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    options = {"partition_num": 2, "costs": "rules", "cluster": "generic-cpu", "stage_compiler": "eager"}
    options |= {"partition_nom": 2} if how == "option" else {}
    torch.manual_seed(0)
    model = torch.compile(Model(branches=how == "refused"), backend="rannc", options=options)
    arrive(rank, directory)
    for step in range(3):
        if step == 1 and (how == "both" or (how == "user" and rank == 1)):
            raise KeyError("a mistake in the script")  # RAISED
        if step == 1 and how == "memory" and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if step == 1 and how == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).backward()


main(sys.argv[1], Path(sys.argv[2]))
