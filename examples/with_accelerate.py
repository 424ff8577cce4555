"""A loop of Hugging Face Accelerate over ranks: digits, with accumulation, clipping, evaluation and a checkpoint.

    mpirun -np 2 python examples/with_accelerate.py --save run
    torchrun --nproc-per-node 2 examples/with_accelerate.py --save run --resume

Two lines differ from a script for one process: `join_job()` before the Accelerator, and `prepare(accelerator, ...)` in place
of `accelerator.prepare(...)`. With --check the same steps are also made by a plain loop, in float64, and must be equal.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rannc_backend.integrations.accelerate import join_job, prepare

_PRECISION = 1e-10


class Classifier(nn.Module):
    """Layers, and the loss."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.last = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, 64], [rows]: the mean loss and [rows, 10]."""
        x = torch.tanh(self.first(images))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores = self.last(x)
        return nn.functional.cross_entropy(scores, digits), scores


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="rows of all ranks in a forward")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards per update")
    parser.add_argument("--steps", type=int, default=20, help="forwards")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--save", default="", help="directory of a checkpoint; empty: none")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --save")
    parser.add_argument("--check", action="store_true", help="compare with a plain loop")
    return parser.parse_args(argv)


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and a learning rate that falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + 0.1 * update))


def plain_losses(flags: argparse.Namespace, model: Classifier, data: TensorDataset) -> list[float]:
    """What one process without Accelerate computes."""
    optimizer, scheduler = optimizer_of(model)
    losses = []
    for step, batch in zip(range(flags.steps), DataLoader(data, batch_size=flags.batch), strict=False):
        loss, _ = model(*batch)
        (loss / flags.accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % flags.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the loss of each forward."""
    flags = parse(argv)
    world = join_job()
    accelerator = Accelerator(gradient_accumulation_steps=flags.accumulate)
    digits = load_digits()
    images = torch.as_tensor(digits.data / 16)
    data = TensorDataset(images, torch.as_tensor(digits.target))
    torch.manual_seed(0)
    plain = Classifier(flags.width, num_layers=4).double()
    reference = copy.deepcopy(plain)
    optimizer, scheduler = optimizer_of(plain)
    loader = DataLoader(data, batch_size=flags.batch // world.size)
    model, optimizer, loader = prepare(
        accelerator, plain, optimizer, loader, options={"partition_num": flags.stages}
    )
    # The scheduler is not prepared: Accelerate would step it once for each process.
    accelerator.register_for_checkpointing(scheduler)
    if flags.resume:
        accelerator.load_state(flags.save)
    losses = []
    for _, batch in zip(range(flags.steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss, _ = model(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    right = num_rows = 0
    model.eval()
    for batch in loader:
        with torch.no_grad():
            _, scores = model(*batch)
        guessed, told = accelerator.gather_for_metrics((scores.argmax(-1), batch[1]))
        right, num_rows = right + int((guessed == told).sum()), num_rows + len(told)
    if losses:
        accelerator.print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    accelerator.print(f"right {right} of {num_rows}")
    if flags.save:
        accelerator.save_state(flags.save)
    if flags.check:
        expected = plain_losses(flags, reference, data)
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if worst > _PRECISION or num_rows != len(data):
            raise SystemExit(f"the losses differ from a plain loop's by {worst:.1e}; {num_rows} rows")
        accelerator.print(f"as in a plain loop: {worst:.1e}")
    return losses


if __name__ == "__main__":
    main()
