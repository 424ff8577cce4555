"""The two ranks that `rannc doctor` starts: `python -m rannc_backend.doctor_job measure|abort FILE`.

In: what to do, and a file for the answer. Out: rank 0 of "measure" writes seconds of messages and all-reduces as JSON; in "abort" rank 1
writes the time and is gone, as if the system had killed it, while rank 0 waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from rannc_backend.runtime import bootstrap
from rannc_backend.runtime.bucket_reductions import BucketReductions
from rannc_backend.runtime.buckets import BucketSpec
from rannc_backend.runtime.link_speed import allreduce_seconds, message_seconds
from rannc_backend.runtime.world import StartOptions, World

_LIMIT_SECONDS = 60.0
# A bucket of 4 MB, which goes through shared memory; float32 has all these numbers and their sums.
_NUM_SUMMED = 2**20


def main(task: str, file: str) -> None:
    """Run one rank."""
    world = bootstrap.start(StartOptions(start_limit_seconds=_LIMIT_SECONDS, limit_seconds=_LIMIT_SECONDS))
    if task == "measure":
        measure(world, Path(file))
    else:
        abort(world, Path(file))


def measure(world: World, file: Path) -> None:
    """Messages and all-reduces between ranks 0 and 1; and whether a sum is right."""
    message = message_seconds(world, [(0, 1)])
    reduction = allreduce_seconds(world, [(0, 1)], shared_memory=True)
    reductions = BucketReductions.of(world.transport, [(0, 1)], shared_memory=True)
    numbers = reductions.new_buffer(
        BucketSpec(ranks=(0, 1), dtype=torch.float32, device=world.device, numel=_NUM_SUMMED, names=())
    )
    torch.arange(_NUM_SUMMED, out=numbers).add_(world.rank)
    reductions.start(numbers, (0, 1)).wait()
    expected = 2 * torch.arange(_NUM_SUMMED, dtype=torch.float32, device=world.device) + 1
    if world.rank == 0:
        answer = {
            "num_ranks": world.size,
            "launcher": world.launcher,
            "device": str(world.device),
            "message": None if message is None else asdict(message),
            "allreduce": None if reduction is None else asdict(reduction),
            "sum_is_right": bool(torch.equal(numbers, expected)),
        }
        file.write_text(json.dumps(answer), encoding="utf-8")
    world.control.barrier(what="end of the test")


def abort(world: World, file: Path) -> None:
    """Rank 1 is gone without a word; rank 0 waits for it."""
    world.control.barrier(what="start of the test")
    if world.rank == 1:
        file.write_text(json.dumps({"time": time.time()}), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    world.control.barrier(what="a rank that has died")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
