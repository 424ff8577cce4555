"""One rank of a job in which one rank fails on purpose.

usage: fault_worker.py FAULT WHERE [RANK]

The failing rank writes "FAULT_AT <unix seconds>" to stderr just before the fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import StartOptions

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.distributed.harness.forked_rank import rank_of_environment  # noqa: E402

FAULTS = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("bad sample")),
    "memory": lambda: (_ for _ in ()).throw(MemoryError("cannot allocate 1 TiB")),
    "exit3": lambda: sys.exit(3),
    "exit0": lambda: sys.exit(0),
    "os_exit0": lambda: os._exit(0),
    "os_exit5": lambda: os._exit(5),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "term": lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(30)),
    "interrupt": lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30)),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": lambda: [None for _ in iter(int, 1)],
    # Once it waits within MPI_Init; the other ranks come later.
    "stop_soon": lambda: subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}"]),
}


def main() -> None:
    fault, where = sys.argv[1], sys.argv[2]
    failing_rank = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    own_rank = rank_of_environment()

    def fail_in(place: str) -> bool:
        """Fail here if this is the place and the rank; returns whether this is the place."""
        if place == where and own_rank == failing_rank:
            time.sleep(0.3)  # the others are to be waiting by now
            sys.stderr.write(f"FAULT_AT {time.time()}\n")
            sys.stderr.flush()
            FAULTS[fault]()
        return place == where

    if fault == "stop_soon" and own_rank != failing_rank:
        time.sleep(3)
    if where in ("before_lookup", "before_call"):
        fail_in("before_lookup")
        time.sleep(1)
        bootstrap.watch_others()
        fail_in("before_call")
        time.sleep(20 if fault not in ("stop", "loop") else 0)  # as who reads data
    fail_in("before_start")
    world = bootstrap.start(StartOptions(start_limit_seconds=4, limit_seconds=4 if fault == "stop" else 60))
    everyone = tuple(range(world.size))
    peer = (world.rank + 1) % world.size
    world.transport.prepare(channels=["forward"], groups=[everyone])
    tensor = torch.ones(1000)
    reductions = BucketReductions.of(world.transport, [everyone], shared_memory=True)
    spec = BucketSpec(ranks=everyone, dtype=torch.float32, device=world.device, numel=2**20, names=())
    bucket = reductions.new_buffer(spec)
    for step in range(3):
        world.monitor.phase(f"step {step}, stage {world.rank}, micro-batch 0, sizes")
        if step == 1:
            fail_in("control")
        world.control.allgather([step])
        world.monitor.phase(f"step {step}, stage {world.rank}, micro-batch 1, forward")
        if step == 1:
            fail_in("receive")
        source = (world.rank - 1) % world.size
        receive = world.transport.irecv(torch.empty(1000), source, "forward")
        send = world.transport.isend(tensor, peer, "forward")
        receive.wait()
        send.wait()
        world.monitor.phase(f"step {step}, stage {world.rank}, all-reduce")
        if step == 1:
            fail_in("allreduce")
        reductions.start(bucket, everyone).wait()
    world.monitor.phase("after the last step")
    if fail_in("after"):
        time.sleep(1.0)


if __name__ == "__main__":
    main()
