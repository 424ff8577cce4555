"""Memory of each of four replicas that train a GPT-2-like model with AdamW, under ZeRO 0, 1 and 2.

    python tests/benchmarks/zero_memory.py

In: sizes. Out: a JSON line per level: bytes of optimizer state and of gradients that the fullest rank keeps, as shares
of what one replica keeps without ZeRO; its resident memory when a step has ended, before and after `zero_grad`, and at
the peak; the median step. Linux only: memory is read from /proc. Gradients are summed over gloo at all levels, since
memory that ranks share is not a process's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

REPLICAS = 4
LIMIT_SECONDS = 900
STEPS, WARM_UP = 6, 2


def parse() -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--level", type=int, help="of this process, which is a rank; left out by users")
    parser.add_argument("--directory", default="", help="likewise")
    return parser.parse_args()


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Train some steps on this rank."""
    import torch
    from gpt_model import Gpt, Sizes
    from step_memory import forget_peak, status_mb

    import rannc_backend
    from rannc_backend.backend import REGISTRY

    torch.manual_seed(0)
    rows = flags.rows * flags.micro_batches
    sizes = Sizes(
        num_layers=flags.layers, width=flags.width, num_heads=8, vocabulary=flags.vocabulary,
        length=flags.length, rows=rows,
    )  # fmt: skip
    model = Gpt(sizes)
    rank = rannc_backend.get_rank()
    tokens = torch.randint(
        flags.vocabulary, (rows, flags.length), generator=torch.Generator().manual_seed(rank)
    )
    options = {
        "stage_replicas": str(REPLICAS), "zero_stage": flags.level, "shared_memory": False, "outputs": "loss",
        "stage_compiler": "eager", "pipeline_num": flags.micro_batches,
    }  # fmt: skip
    call = torch.compile(model, backend="rannc", options=options)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, loss = [], None
    for number in range(STEPS + WARM_UP):
        if number == WARM_UP:
            forget_peak()
        began = time.perf_counter()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        before_clear = status_mb("VmRSS")
        session = REGISTRY.of(model)
        assert session is not None, "planned by now"
        gradients = sum(buffer.nbytes for buffer in session.pool.tensors())
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameter_mb": round(whole / 2**20, 1),
        "optimizer_share": round(sum(value.nbytes for value in states) / (2 * whole), 4),
        "gradient_share": round(gradients / whole, 4),
        "resident_mb": round(before_clear, 1),
        "resident_after_clear_mb": round(status_mb("VmRSS"), 1),
        "peak_mb": round(status_mb("VmHWM"), 1),
        "median_seconds": round(statistics.median(seconds[WARM_UP:]), 3),
        "loss": float(loss),
    }


def run(flags: argparse.Namespace, level: int) -> dict[str, Any]:
    """All ranks at one level; the largest of each figure."""
    sizes = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(flags).items()
        if name not in ("level", "directory")
    ]
    with tempfile.TemporaryDirectory() as directory:
        command = [
            "mpirun", "-n", str(REPLICAS), sys.executable, __file__, *sizes, f"--level={level}", f"--directory={directory}",
        ]  # fmt: skip
        # Freed memory goes back at once, so that what is resident is what is kept.
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "CUDA_VISIBLE_DEVICES": "",
        }
        subprocess.run(command, env=environment, check=True, timeout=LIMIT_SECONDS, stderr=subprocess.DEVNULL)
        found = [json.loads(path.read_text(encoding="ascii")) for path in sorted(Path(directory).iterdir())]
    assert len(found) == REPLICAS and len({each["loss"] for each in found}) == 1, f"ranks differ: {found}"
    return {"level": level} | {name: max(each[name] for each in found) for name in found[0]}


def main() -> None:
    """Measure the three levels, or be one of their ranks."""
    flags = parse()
    if flags.level is not None:
        found = measure(flags)
        Path(flags.directory, str(os.getpid())).write_text(json.dumps(found), encoding="ascii")
        return
    for level in range(3):
        print(json.dumps(run(flags, level)), flush=True)


if __name__ == "__main__":
    main()
