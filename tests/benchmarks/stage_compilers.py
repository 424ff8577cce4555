"""When compiling the stages pays on CPUs: `python tests/benchmarks/stage_compilers.py [--sizes
small,middle,large] [--rounds 7]`.

In: nothing. GPT-2s of three sizes (random weights, 8 rows of 128 tokens), one process, one thread. Out: JSON,
for each size: seconds of the first call with eager stages and with Inductor (an empty cache), the step's
median seconds with both, alternating round by round, and after how many steps, and how many hours of
training, Inductor has given back what it took. The rule in rannc_backend/planner/cost/small_models.py is
taken from this. Each size runs in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

SIZES = {
    "small": (4, 128, 256),
    "middle": (6, 384, 8192),
    "large": (12, 768, 32768),
}  # layers, width, vocabulary
ROWS, TOKENS = 8, 128
LIMIT_SECONDS = 3000.0


def measure(layers: int, width: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """One size, in this process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, n_positions=TOKENS, vocab_size=vocabulary, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS))
    steps, first = {}, {}
    for compiler in ("eager", "inductor"):
        own = copy.deepcopy(model)
        compiled = torch.compile(
            own, backend="rannc", options={"stage_compiler": compiler, "report_steps": 0}
        )
        steps[compiler] = lambda compiled=compiled, own=own: (
            compiled(input_ids=ids, labels=ids).loss.backward(),
            own.zero_grad(),
        )
        begin = time.perf_counter()
        steps[compiler]()
        first[compiler] = time.perf_counter() - begin
    seconds: dict[str, list[float]] = {compiler: [] for compiler in steps}
    for _ in range(rounds):
        for compiler, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[compiler].append(time.perf_counter() - begin)
    eager, inductor = (statistics.median(seconds[compiler]) for compiler in ("eager", "inductor"))
    saved = eager - inductor
    num_steps = (first["inductor"] - first["eager"]) / saved if saved > 0 else None
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_call_seconds": {name: round(value, 1) for name, value in first.items()},
        "step_seconds": {"eager": round(eager, 4), "inductor": round(inductor, 4)},
        "eager / inductor": round(eager / inductor, 3),
        "steps_to_give_back": None if num_steps is None else round(num_steps),
        "minutes_to_give_back": None if num_steps is None else round(num_steps * eager / 60, 1),
    }


def main() -> None:
    """Measure each size in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.here:
        print(json.dumps(measure(*SIZES[flags.here], flags.rounds)))
        return
    found = {}
    for size in flags.sizes.split(","):
        with tempfile.TemporaryDirectory() as caches:
            environ = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": caches,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--here", size, "--rounds", str(flags.rounds)]
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        if done.returncode:
            raise SystemExit(f"{size} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found[size] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({size: found[size]}), flush=True)


if __name__ == "__main__":
    main()
