"""One rank of a job whose ranks share a GPU: trains, compares with plain torch, and ends with a line "ok
<rank>".

usage: rank_worker.py CHECK REPLICAS STAGE_COMPILER [DEVICE]   (CHECK: "equal", "no_wait", "long", or "wires": what
travels is rounded; DEVICE: cuda, or cpu to try the worker)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rannc_backend.runtime.job import bootstrap
from tests.gpu.small_gpt import OPTIONS, make_model, make_tokens, train, worst_difference  # noqa: E402

ROWS = (3, 5)
WIRES = {
    "boundary_dtype": "bf16",
    "gradient_dtype": "bf16",
    "gradient_scale": 16.0,
    "max_buckets": 3,
    "num_communicators": 2,
}


def _own(tokens: torch.Tensor, rank: int) -> torch.Tensor:
    start = sum(ROWS[:rank])
    return tokens[start : start + ROWS[rank]]


def main(check: str, replicas: str, stage_compiler: str, device_type: str = "cuda") -> None:
    """Run one check on this rank."""
    world = bootstrap.start()
    assert world.size == len(ROWS) and world.device.type == device_type, world
    device = world.device
    model, plain = make_model(device, torch.float64), make_model(device, torch.float64)
    options = OPTIONS | {"stage_replicas": replicas, "stage_compiler": stage_compiler, "pipeline_num": 3}
    rounds = check == "wires"
    call = torch.compile(model, backend="rannc", options=options | (WIRES if rounds else {}))
    num_steps = 30 if check == "long" else 4
    batches = [make_tokens(device, step) for step in range(num_steps)]
    losses = train(model, call, [_own(batch, world.rank) for batch in batches])
    expected = train(plain, plain, batches)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    assert worst < (2e-2 if rounds else 1e-8), f"losses {losses}, in one process {expected}"
    assert not rounds or worst > 1e-8, "nothing was rounded"
    difference = worst_difference(model, plain)
    assert rounds or difference < 1e-6, f"parameters or gradients differ by {difference}"
    if check == "no_wait":
        own = _own(batches[0], world.rank)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            model.zero_grad()
            call(own).backward()
        torch.cuda.set_sync_debug_mode("default")
    sys.stdout.write(f"transport {type(world.transport).__name__}\nok {world.rank}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
