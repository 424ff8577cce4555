"""Train with Lightning's Trainer: one line of a script for one process changes, ``strategy=``.

    mpirun -np 2 python examples/train_lightning.py
    python examples/train_lightning.py

A small convolutional network learns the handwritten digits that scikit-learn ships. The Trainer validates, clips by the
norm of all ranks, writes a checkpoint and, with --resume, goes on from one, on any number of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rannc_backend
from rannc_backend.integrations.lightning import RanncStrategy


class Digits(L.LightningModule):
    """Images of 8 x 8 pixels, ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of this rank's rows."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True)
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Accuracy over the rows of all ranks."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> object:
        """AdamW, with a learning rate that falls by epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=96, help="images of all ranks per step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--save", default="", help="a file for a checkpoint at the end")
    parser.add_argument("--resume", default="", help="such a file")
    parser.add_argument("--plain", action="store_true", help="Lightning's own strategy for one process")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the losses of all steps, of all ranks."""
    flags = parse(argv)
    images, labels = load_digits(return_X_y=True)
    dtype = torch.float64 if flags.precision == "64-true" else torch.float32
    rows = torch.tensor(images, dtype=dtype).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(rows, torch.tensor(labels))
    train, valid = TensorDataset(*data[:1344]), TensorDataset(*data[1344:1728])
    rannc_backend.init()
    rank, size = (0, 1) if flags.plain else (rannc_backend.get_rank(), rannc_backend.get_world_size())
    # Each rank reads its part. Without a sampler of the script's own, the Trainer puts one in that shuffles.
    sampler = DistributedSampler(train, size, rank, shuffle=False)
    torch.manual_seed(0)
    model = Digits(flags.width)
    trainer = L.Trainer(
        strategy="auto" if flags.plain else RanncStrategy({"partition_num": flags.stages}),
        accelerator="cpu" if flags.plain else "auto",
        devices=1 if flags.plain else "auto",
        max_epochs=flags.epochs,
        precision=flags.precision,
        accumulate_grad_batches=flags.accumulate,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    batch = flags.batch // size
    trainer.fit(
        model,
        DataLoader(train, batch, sampler=sampler),
        DataLoader(valid, batch),
        ckpt_path=flags.resume or None,
    )
    if flags.save:
        trainer.save_checkpoint(flags.save)
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"done: loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}, accuracy {accuracy:.3f}")
    return model.losses


if __name__ == "__main__":
    main()
