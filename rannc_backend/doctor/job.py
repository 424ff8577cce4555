"""The ranks that `rannc doctor` starts: `python -m rannc_backend.doctor.job measure|abort|train FILE`.

In: what to do, and a file for the answer. Out, as JSON: rank 0 of "measure" tells which connections fail, and
seconds of messages and all-reduces; in "abort" rank 1 tells the time and is gone, as if the system had killed
it, while rank 0 waits for it; rank 0 of "train" tells the losses of some steps beside those of one process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rannc_backend.doctor.answers import ANSWER_MARK
from rannc_backend.doctor.connections import connection_answer
from rannc_backend.doctor.training import train
from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.launch import find_launch
from rannc_backend.runtime.trace.link_speed import allreduce_seconds, message_seconds
from rannc_backend.runtime.world import StartOptions, World
from rannc_backend.settings import hooks
from rannc_backend.settings.sources import CONFIG_DIRECTORY_VARIABLE

_LIMIT_SECONDS = 60.0
# A bucket of 4 MB, which goes through shared memory; float32 has all these numbers and their sums.
_NUM_SUMMED = 2**20


def main(task: str, file: str) -> None:
    """Run one rank."""
    # The user's options may name plans and files that are for another model, and this folder has none.
    hooks.replace_item("doctor's job", os.environ, CONFIG_DIRECTORY_VARIABLE, str(Path(__file__).parent))
    connections = connection_answer(os.environ, _LIMIT_SECONDS) if task == "measure" else None
    if connections is not None and connections["failed"]:
        # A job would only wait for what cannot come.
        if find_launch(os.environ).rank == 0:
            write_answer(file, {"connections": connections})
        return
    world = bootstrap.start(StartOptions(start_limit_seconds=_LIMIT_SECONDS, limit_seconds=_LIMIT_SECONDS))
    if task == "abort":
        abort(world, file)
        return
    answer = (
        train(world.rank, world.size, world.device)
        if task == "train"
        else {**measure(world), "connections": connections}
    )
    if world.rank == 0:
        write_answer(file, answer)
    world.control.barrier(what="end of the test")


def measure(world: World) -> dict[str, Any]:
    """Messages and all-reduces between ranks 0 and 1; and whether a sum is right. Collective."""
    if world.size == 1:
        return {"num_ranks": 1}
    message = message_seconds(world, [(0, 1)])
    reduction = allreduce_seconds(world, [(0, 1)], shared_memory=True)
    everybody = tuple(range(world.size))
    reductions = BucketReductions.of(world.transport, [everybody], shared_memory=True)
    numbers = reductions.new_buffer(
        BucketSpec(ranks=everybody, dtype=torch.float32, device=world.device, numel=_NUM_SUMMED, names=())
    )
    torch.arange(_NUM_SUMMED, out=numbers).add_(world.rank)
    reductions.start(numbers, everybody).wait()
    expected = world.size * torch.arange(_NUM_SUMMED, dtype=torch.float32, device=world.device) + sum(
        everybody
    )
    return {
        "num_ranks": world.size,
        "num_hosts": len(set(world.hosts)),
        "launcher": world.launcher,
        "device": str(world.device),
        "message": None if message is None else asdict(message),
        "allreduce": None if reduction is None else asdict(reduction),
        "sum_is_right": bool(torch.allclose(numbers, expected, rtol=1e-6, atol=0)),
    }


def abort(world: World, file: str) -> None:
    """Rank 1 is gone without a word; rank 0 waits for it."""
    world.control.barrier(what="start of the test")
    if world.rank == 1:
        write_answer(file, {"time": time.time()})
        os.kill(os.getpid(), signal.SIGKILL)
    world.control.barrier(what="a rank that has died")


def write_answer(file: str, answer: Mapping[str, Any]) -> None:
    """To the doctor's folder, or, on a host that does not have it, among what the job prints."""
    text = json.dumps(answer)
    if Path(file).parent.is_dir():
        Path(file).write_text(text, encoding="utf-8")
    else:
        os.write(1, f"\n{ANSWER_MARK}{text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
