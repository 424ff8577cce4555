"""Step time and peak memory of one process that trains a GPT-2-like model; prints one JSON line.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/benchmarks/step_memory.py --compiler inductor

In: sizes. Out: the fastest and the median step, and the process's peak resident memory while it steps, after
the steps that compile. Linux
only: the peak is read from /proc, and with the variable above freed memory goes back at once. To compare two
versions of the package, run them by turns (`PYTHONPATH` says which). Sizes are chosen so that parameters and
gradients are most of the memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_model import Gpt, Sizes  # noqa: E402


def parse() -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def status_mb(name: str) -> float:
    """A figure of this process in MB: VmRSS, what is resident; VmHWM, its peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def forget_peak() -> None:
    """Let the peak be what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Train some steps and print."""
    flags = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = Sizes(
        num_layers=flags.layers,
        width=flags.width,
        num_heads=8,
        vocabulary=flags.vocabulary,
        length=flags.length,
        rows=flags.rows,
    )
    model = Gpt(sizes)
    tokens = torch.randint(flags.vocabulary, (flags.rows, flags.length))
    options = {"stage_compiler": flags.compiler, "outputs": "loss", "pipeline_num": flags.micro_batches}
    call = torch.compile(model, backend="rannc", options=options)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds, losses = [], []
    for number in range(flags.steps + 2):
        if number == 2:
            forget_peak()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number >= 2:
            seconds.append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "compiler": flags.compiler,
                "parameter_mb": round(parameter_bytes / 2**20, 1),
                "peak_mb": round(status_mb("VmHWM"), 1),
                "fastest_seconds": round(min(seconds), 4),
                "median_seconds": round(statistics.median(seconds), 4),
                "last_loss": losses[-1],
            }
        )
    )


if __name__ == "__main__":
    main()
