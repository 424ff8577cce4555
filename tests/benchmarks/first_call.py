"""Seconds of a first call over ranks: `mpirun -np 2 python tests/benchmarks/first_call.py [--models 3]
[--layers 4]`.

In: a depth of a GPT-2-like model (width 64), cut into as many stages as there are ranks, eager stage
compiler, blocks priced by rules. Out: rank 0 prints one JSON line: processor seconds and wall seconds of the
first forward and backward, the median over new models of one process. A smaller model comes first, so that
imports are not counted. To compare two versions, run both by turns (PYTHONPATH says which).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

import rannc_backend as pyrannc  # noqa: E402
from tests.benchmarks.gpt_model import Gpt, Sizes  # noqa: E402


def first_call(num_layers: int) -> tuple[float, float]:
    """(processor, wall) seconds of the first call of a new model."""
    sizes = Sizes(num_layers=num_layers, width=64, num_heads=4, vocabulary=200, length=16, rows=4)
    torch._dynamo.reset()
    options = {"partition_num": pyrannc.get_world_size(), "pipeline_num": 2, "stage_compiler": "eager"}
    options |= {"costs": "rules", "cluster": "generic-cpu"}
    model = torch.compile(Gpt(sizes), backend="rannc", options=options)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.length))
    pyrannc.barrier()
    computed, begin = time.process_time(), time.monotonic()
    model(tokens).backward()
    return time.process_time() - computed, time.monotonic() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=3, help="how many models to take the median of")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    pyrannc.barrier()
    first_call(pyrannc.get_world_size())
    seconds = [first_call(arguments.layers) for _ in range(arguments.models)]
    if pyrannc.get_rank() == 0:
        names = ("processor_seconds", "wall_seconds")
        print(
            json.dumps({name: round(statistics.median(row), 2) for name, row in zip(names, zip(*seconds))}),
            flush=True,
        )


if __name__ == "__main__":
    main()
