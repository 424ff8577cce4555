"""One rank of a job whose ranks share a GPU: trains, compares with plain torch, and ends with a line "ok
<rank>".

usage: rank_worker.py DEVICE STAGE_COMPILER CHECK:REPLICAS ...   (DEVICE: cuda, or cpu to try the worker; CHECK: "equal",
"no_wait", "long", or a name of OPTIONS_OF; several are made one after the other, on the same communicators)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rannc_backend.runtime.job import bootstrap
from tests.gpu.small_gpt import OPTIONS, make_model, make_tokens, train, worst_difference  # noqa: E402

ROWS = {2: (3, 5), 4: (1, 3, 2, 2)}  # of each rank, by number of ranks
OPTIONS_OF: dict[str, dict[str, Any]] = {
    "wires": {  # what travels is rounded
        "boundary_dtype": "bf16",
        "gradient_dtype": "bf16",
        "gradient_scale": 16.0,
        "max_buckets": 3,
        "num_communicators": 2,
    },
    "parts": {"schedule": "zb_h1"},
    "lanes": {"schedule": "zb_v", "stages_per_rank": 2},
    "interleaved": {"schedule": "interleaved", "stages_per_rank": 2},
    "zero": {"zero_stage": 2, "bucket_mb": 0.05},
    "offload": {"offload": "parameters"},
    "segments": {"recompute": "segments"},
}


def _own(tokens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tokens.split(ROWS[size])[rank]


def make_check(world: bootstrap.World, stage_compiler: str, check: str, replicas: str) -> None:
    """Run one check on this rank."""
    torch._dynamo.reset()
    device = world.device
    model, plain = make_model(device, torch.float64), make_model(device, torch.float64)
    options = OPTIONS | {"stage_replicas": replicas, "stage_compiler": stage_compiler, "pipeline_num": 3}
    rounds = check == "wires"
    call = torch.compile(model, backend="rannc", options=options | OPTIONS_OF.get(check, {}))
    num_steps = 30 if check == "long" else 4
    batches = [make_tokens(device, step) for step in range(num_steps)]
    losses = train(model, call, [_own(batch, world.rank, world.size) for batch in batches])
    expected = train(plain, plain, batches)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    assert worst < (2e-2 if rounds else 1e-8), f"losses {losses}, in one process {expected}"
    assert not rounds or worst > 1e-8, "nothing was rounded"
    difference = worst_difference(model, plain)
    assert rounds or difference < 1e-6, f"parameters or gradients differ by {difference}"
    if check == "no_wait":
        own = _own(batches[0], world.rank, world.size)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            model.zero_grad()
            call(own).backward()
        torch.cuda.set_sync_debug_mode("default")


def main(device_type: str, stage_compiler: str, *checks: str) -> None:
    """Run the checks, each told as it is done."""
    world = bootstrap.start()
    assert world.size in ROWS and world.device.type == device_type, world
    for number, words in enumerate(checks, 1):
        begin = time.monotonic()
        make_check(world, stage_compiler, *words.split(":"))
        if world.rank == 0:
            seconds = time.monotonic() - begin
            sys.stdout.write(f"done {number} of {len(checks)}: {words}, {seconds:.1f} s\n")
            sys.stdout.flush()
    sys.stdout.write(f"transport {type(world.transport).__name__}\nok {world.rank}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
