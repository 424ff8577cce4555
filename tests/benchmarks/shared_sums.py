"""An all-reduce of a bucket between ranks of one host: over gloo / in memory that they share; prints JSON
lines.

    mpirun -np 2 python tests/benchmarks/shared_sums.py

In: sizes and rounds. Out: per size the median seconds of both, which take turns, and their ratio (above 1
shared memory is faster). The floor is what memory can move: every bucket is read once and written once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import World


def measure(world: World, num_bytes: int, rounds: int) -> dict[str, float]:
    """Median seconds of both ways. Collective."""
    everyone = tuple(range(world.size))
    spec = BucketSpec(
        ranks=everyone, dtype=torch.float32, device=world.device, numel=num_bytes // 4, names=()
    )
    ways = {
        name: BucketReductions.of(world.transport, [everyone], shared_memory=shared)
        for name, shared in (("gloo", False), ("shared", True))
    }
    buckets = {name: way.new_buffer(spec).fill_(1.0) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            buckets[name].fill_(1.0)
            world.control.barrier()
            begin = time.perf_counter()
            way.start(buckets[name], everyone).wait()
            taken = time.perf_counter() - begin
            assert buckets[name].eq(world.size).all(), f"a wrong sum ({name})"
            if number >= 2:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure every size; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 0.25, 1, 4, 25, 100])
    parser.add_argument("--rounds", type=int, default=21)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    world = bootstrap.start()
    for size in flags.megabytes:
        found = measure(world, int(size * 2**20), flags.rounds)
        if world.rank == 0:
            line = {
                "ranks": world.size,
                "megabytes": size,
                **{f"{name}_ms": round(1000 * value, 3) for name, value in found.items()},
            }
            print(
                json.dumps({**line, "gloo / shared": round(found["gloo"] / found["shared"], 2)}), flush=True
            )


if __name__ == "__main__":
    main()
