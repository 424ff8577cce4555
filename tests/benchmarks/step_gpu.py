"""One-process training step of GPT-2 in bfloat16, this backend beside plain torch.compile; prints a JSON line
per model and precision.

    python tests/benchmarks/step_gpu.py

In: models, rows, rounds. Out: seconds of a step (zero_grad, forward, backward, AdamW) of both, and the ratio:
plain torch.compile's seconds over ours, above 1 we are faster; to reach: 0.99. "pure": parameters in
bfloat16; "autocast": in float32 under autocast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_model import Sizes  # noqa: E402
from gpu_report import medians_of, new_gpt2, new_tokens, optimizer_of, parse, report, sizes_of  # noqa: E402

# After the same few steps from the same weights the losses of both are the same up to rounding in bfloat16.
LOSS_TOLERANCE = 0.05


def make_step(
    backend: dict[str, Any], sizes: Sizes, flags: argparse.Namespace, precision: str
) -> Callable[[], torch.Tensor]:
    """A training step of a model compiled with these arguments of torch.compile; gives the loss, still on the
    device.
    """
    model = new_gpt2(sizes, flags, torch.bfloat16 if precision == "pure" else torch.float32)
    tokens = new_tokens(sizes, flags)
    optimizer = optimizer_of(model, flags)
    compiled = torch.compile(model, **backend)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(flags.device, dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compare(name: str, precision: str, flags: argparse.Namespace) -> None:
    """Measure one model."""
    sizes = sizes_of(name, flags)
    options = {"pipeline_num": 1, "outputs": "loss", "report_steps": 0}
    backends: dict[str, dict[str, Any]] = {
        "rannc": {"backend": "rannc", "options": options},
        "torch_compile": {},
    }
    steps = {
        contender: make_step(backend, sizes, flags, precision) for contender, backend in backends.items()
    }
    losses = {contender: [float(step()) for _ in range(3)][-1] for contender, step in steps.items()}
    difference = abs(losses["rannc"] - losses["torch_compile"])
    assert difference <= LOSS_TOLERANCE * abs(losses["torch_compile"]), (
        f"they compute different things: {losses}"
    )
    seconds = medians_of(steps, flags)
    report(
        "step",
        flags,
        model=name,
        precision=precision,
        rows=sizes.rows,
        length=sizes.length,
        seconds=seconds,
        ratio=seconds["torch_compile"] / seconds["rannc"],
        losses=losses,
    )


def main() -> None:
    """Measure all."""
    flags = parse(__doc__.splitlines()[0])
    for name in flags.models.split(","):
        for precision in ("pure", "autocast"):
            torch._dynamo.reset()
            compare(name, precision, flags)


if __name__ == "__main__":
    main()
