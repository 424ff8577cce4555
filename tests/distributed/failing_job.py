"""A small training job in which one thing goes wrong on one rank; a script for test_failures.py.

In: arguments --how (what happens), --where (phase), --rank, --steps. Out: on the way it writes the time of
the failure to --stamp. Failures inside of a stage's computation are planted by replacing methods of the
executor in this process.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

# torch.compile imports it before it looks for a backend, and a rank hears of others' ends from there on.
import torch._dynamo  # noqa: E402

from tests.distributed.harness.forked_rank import rank_of_environment  # noqa: E402
from tests.models import entry  # noqa: E402

STEP, MICRO_BATCH = 2, 1
CAUSE = "planted: the disk is on fire"


def fail(how: str, stamp: str) -> None:
    """End this rank, or freeze it."""
    Path(stamp).write_text(repr(time.time()))
    if how == "exception":
        raise ValueError(CAUSE)
    if how == "memory":
        raise torch.OutOfMemoryError(CAUSE)
    if how == "exit":
        sys.exit(5)
    if how == "exit_0":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError(f"unknown way to fail: {how}")


def plant(method: str, how: str, stamp: str) -> None:
    """Make the executor fail in one action of the second step."""
    from rannc_backend.runtime.step.executor import Executor

    original = getattr(Executor, method)

    def patched(self: Any, action: Any, state: Any) -> None:
        if state.number >= STEP and action.micro_batch == MICRO_BATCH:
            fail(how, stamp)
        original(self, action, state)

    setattr(Executor, method, patched)


def main() -> None:
    """Train until the failure; without one, for --steps steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="exception")
    parser.add_argument("--where", default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stamp", default="/dev/null")
    parser.add_argument("--world", type=int, default=1)
    arguments = parser.parse_args()
    rank = rank_of_environment()
    failing = arguments.where if rank == arguments.rank else "none"
    chosen = entry("dict_output")
    model = chosen.model(0, torch.float32)
    if failing in ("forward", "backward"):
        plant(f"_{failing}", arguments.how, arguments.stamp)
    if failing == "before":
        fail(arguments.how, arguments.stamp)
    if failing == "capture":
        from rannc_backend.capture import graph as capture

        capture.capture_or_restart = lambda *_, **__: fail(arguments.how, arguments.stamp)
    options: dict[str, Any] = {"pipeline_num": 3, "stage_compiler": "eager", "step_timeout_seconds": 5.0}
    options["stage_replicas"] = ",".join(["1"] * arguments.world)
    compiled = torch.compile(model, backend="rannc", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, arguments.steps + 1):
        batch = chosen.batch(6, step, torch.float32)
        if failing == "data" and step == STEP:
            Path(arguments.stamp).write_text(repr(time.time()))
            batch["labels"][3] = 77
        optimizer.zero_grad()
        with suppress(Exception) if arguments.how == "caught" else nullcontext():
            loss = chosen.loss_of(chosen.call(compiled, batch), batch)
            loss.backward()
        if failing == "between" and step == STEP:
            fail(arguments.how, arguments.stamp)
        optimizer.step()
    print(f"rank {rank} trained {arguments.steps} steps", flush=True)


if __name__ == "__main__":
    main()
