"""Forward and backward with gradients born in buckets, beside DDP's `gradient_as_bucket_view`, each in a
group of one; prints JSON lines.

    python tests/benchmarks/backward_gpu.py

In: models, rows, rounds. Out: seconds of zero_grad, forward and backward (1F1B), and of the backward call
alone (fill-drain), of both, and the ratios: DDP's seconds over ours, above 1 we are faster; peak bytes of
both. DDP copies nothing into its buckets either, as long as nobody sets gradients to None;
zero_grad(set_to_none=True), torch's default, makes it copy every gradient again: both are measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_report import medians_of, new_gpt2, new_tokens, parse, peak_bytes, report, sizes_of, synchronize  # noqa: E402


class Run:
    """One contender: its forward and its backward."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[torch.Tensor], torch.Tensor],
        tokens: torch.Tensor,
        *,
        set_to_none: bool,
    ) -> None:
        self._module = module
        self._call = call
        self._tokens = tokens
        self._set_to_none = set_to_none

    def forward(self) -> torch.Tensor:
        """Gradients cleared, and the loss."""
        self._module.zero_grad(set_to_none=self._set_to_none)
        return self._call(self._tokens)

    def both(self) -> None:
        """Forward and backward."""
        self.forward().backward()


def contenders_of(name: str, flags: argparse.Namespace, schedule: str) -> dict[str, Run]:
    """This backend, and DDP with both ways of clearing gradients."""
    sizes = sizes_of(name, flags)
    tokens = new_tokens(sizes, flags)
    own = new_gpt2(sizes, flags, torch.bfloat16)
    options = {"pipeline_num": 1, "outputs": "loss", "report_steps": 0, "schedule": schedule}
    runs = {"rannc": Run(own, torch.compile(own, backend="rannc", options=options), tokens, set_to_none=True)}
    for contender, set_to_none in (("ddp", True), ("ddp_gradients_kept", False)):
        wrapped = DistributedDataParallel(
            new_gpt2(sizes, flags, torch.bfloat16), gradient_as_bucket_view=True
        )
        runs[contender] = Run(wrapped, torch.compile(wrapped), tokens, set_to_none=set_to_none)
    return runs


def backward_seconds(run: Run, flags: argparse.Namespace) -> float:
    """Median seconds of the backward call alone."""
    times = []
    for _ in range(flags.rounds + 3):
        loss = run.forward()
        synchronize(flags)
        begin = time.perf_counter()
        loss.backward()
        synchronize(flags)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def compare(name: str, flags: argparse.Namespace) -> None:
    """Measure one model."""
    runs = contenders_of(name, flags, "auto")
    both = medians_of({contender: run.both for contender, run in runs.items()}, flags)
    peaks = {contender: peak_bytes(run.both, flags) for contender, run in runs.items()}
    report(
        "forward and backward",
        flags,
        model=name,
        seconds=both,
        ratio=both["ddp"] / both["rannc"],
        ratio_gradients_kept=both["ddp_gradients_kept"] / both["rannc"],
        peak_bytes=peaks,
    )
    torch._dynamo.reset()
    runs = contenders_of(name, flags, "fill_drain")
    alone = {contender: backward_seconds(run, flags) for contender, run in runs.items()}
    report(
        "backward",
        flags,
        model=name,
        seconds=alone,
        ratio=alone["ddp"] / alone["rannc"],
        ratio_gradients_kept=alone["ddp_gradients_kept"] / alone["rannc"],
    )


def main() -> None:
    """Measure all."""
    flags = parse(__doc__.splitlines()[0])
    dist.init_process_group(
        "nccl" if flags.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        for name in flags.models.split(","):
            torch._dynamo.reset()
            compare(name, flags)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
