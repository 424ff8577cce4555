"""One rank of a training job to which things happen: chaos_worker.py DIRECTORY LAST_STEP REPLICAS [STEP RANK
HOW].

Trains to step LAST_STEP from the latest checkpoint in DIRECTORY, or from the beginning; saves one every few
steps. In step STEP it happens to rank RANK. Every rank appends "step loss" to DIRECTORY/rank<r>.txt, and
writes the time to DIRECTORY/stamp before it happens. A rank that gets SIGUSR1 asks for an end in order, as
schedulers do before they take a machine away: all save and end with code 0 after the step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

import rannc_backend  # noqa: E402
from tests.distributed.chaos import (
    CAUSE,
    SAVE_EVERY,
    STEP_LIMIT_SECONDS,
    batch_of,
    model_of,
    optimizer_of,
    scheduler_of,
)  # noqa: E402
from tests.distributed.harness.forked_rank import rank_of_environment  # noqa: E402

_ASKED: list[int] = []


def happen(how: str, directory: Path) -> None:
    """Do it to this rank."""
    (directory / "stamp").write_text(repr(time.time()))
    if how == "exception":
        raise ValueError(CAUSE)
    if how == "inside":
        # In the middle of the step that begins now: when it sends, the others wait for what it sends.
        from rannc_backend.runtime.step import executor

        def fail(*_: Any) -> None:
            (directory / "stamp").write_text(repr(time.time()))
            raise ValueError(CAUSE)

        executor.slice_rows = fail
        return
    number = {
        "kill": signal.SIGKILL,
        "freeze": signal.SIGSTOP,
        "terminate": signal.SIGTERM,
        "preempt": signal.SIGUSR1,
    }[how]
    os.kill(os.getpid(), number)
    if how == "terminate":
        time.sleep(60)


def main(
    directory: Path, last_step: int, replicas: str, at: int = 0, at_rank: int = -1, how: str = ""
) -> None:
    """Train."""
    signal.signal(signal.SIGUSR1, lambda *_: _ASKED.append(1))
    rank = rank_of_environment()
    model = model_of()
    options = {
        "stage_replicas": replicas,
        "pipeline_num": 2,
        "stage_compiler": "eager",
        "step_timeout_seconds": STEP_LIMIT_SECONDS,
    }
    if "," in replicas:
        options["stage_starts"] = "2"
    compiled = torch.compile(model, backend="rannc", options=options)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    torch.manual_seed(1000 + rank)  # the state of a checkpoint counts where there is one
    checkpoints, step = directory / "checkpoints", 0
    if list(checkpoints.glob("step-*")):
        step = rannc_backend.load_checkpoint(checkpoints, compiled, optimizer, scheduler).step
    with (directory / f"rank{rank}.txt").open("a", buffering=1) as lines:
        while step < last_step:
            step += 1
            x, target = batch_of(rank, step)
            if (step, rank) == (at, at_rank):
                happen(how, directory)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(compiled(x), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
            lines.write(f"{step} {loss.item()!r}\n")
            ask = torch.tensor([len(_ASKED)])
            torch.distributed.all_reduce(ask)
            if ask.item() or step % SAVE_EVERY == 0 or step == last_step:
                rannc_backend.save_checkpoint(
                    checkpoints, compiled, optimizer, scheduler, step=step, keep=2, asynchronous=step % 2 == 0
                )
            if ask.item():
                break
        rannc_backend.wait_for_checkpoint()


if __name__ == "__main__":
    begun = sys.argv[4:]
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        *([int(begun[0]), int(begun[1]), begun[2]] if begun else []),
    )
