"""Train with Lightning Fabric: two lines of a script for one process change, ``strategy=`` and ``torch.compile``.

    mpirun -np 2 python examples/train_fabric.py
    python examples/train_fabric.py

A small network learns the handwritten digits that scikit-learn ships, with accumulation, clipping by the norm of all ranks,
accuracy over all ranks and a checkpoint; with --resume it goes on from one, on any number of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rannc_backend.integrations.fabric import RanncFabricStrategy


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=96, help="images of all ranks per forward")
    parser.add_argument("--steps", type=int, default=28, help="forwards")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--save", default="", help="a file for a checkpoint at the end")
    parser.add_argument("--resume", default="", help="such a file")
    parser.add_argument("--plain", action="store_true", help="Fabric's own strategy for one process")
    return parser.parse_args(argv)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Images [rows, 64] in the default dtype and labels [rows], to learn from and to be asked about."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images, dtype=torch.get_default_dtype()) / 16, torch.tensor(labels)
    return tuple(TensorDataset(*(value[part] for value in rows)) for part in (slice(1344), slice(1344, 1728)))  # type: ignore[return-value]


def accuracy_of(fabric: L.Fabric, model: nn.Module, loader: Any) -> float:
    """The part of the rows of all ranks that the model gets right."""
    model.eval()
    counts = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    model.train()
    right, total = fabric.all_reduce(counts, reduce_op="sum")
    return float(right / total)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the losses of all forwards, of all ranks, then the norms of gradients and the accuracy."""
    flags = parse(argv)
    fabric = L.Fabric(
        accelerator="cpu" if flags.plain else "auto",
        devices=1,
        strategy="auto" if flags.plain else RanncFabricStrategy(),
        precision="64-true" if torch.get_default_dtype() == torch.float64 else flags.precision,
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    layers: list[nn.Module] = [nn.Linear(64, flags.width), nn.Tanh(), nn.Linear(flags.width, flags.width)]
    model: Any = nn.Sequential(*layers, nn.Tanh(), nn.Linear(flags.width, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not flags.plain:
        model = torch.compile(model, backend="rannc", options={"partition_num": flags.stages})
    model, optimizer = fabric.setup(model, optimizer)
    train, valid = datasets()
    batch = flags.batch // fabric.world_size
    # The order of one process. Without a sampler of the script's own, Fabric puts one in that deals rows to ranks.
    sampler = DistributedSampler(train, fabric.world_size, fabric.global_rank, shuffle=False)
    loader, held_out = fabric.setup_dataloaders(
        DataLoader(train, batch, sampler=sampler), DataLoader(valid, batch)
    )
    state = {"model": model, "optimizer": optimizer, "forwards": 0}
    if flags.resume:
        fabric.load(flags.resume, state)
    losses, norms, batches = [], [], iter(loader)
    for number in range(state["forwards"], state["forwards"] + flags.steps):
        found = next(batches, None)
        if found is None:
            batches = iter(loader)
            found = next(batches)
        is_update = (number + 1) % flags.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_update):
            loss = F.cross_entropy(model(found[0]), found[1])
            fabric.backward(loss / flags.accumulate)
        losses.append(float(fabric.all_reduce(loss.detach())))
        if is_update:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state["forwards"] += flags.steps
    accuracy = accuracy_of(fabric, model, held_out)
    if flags.save:
        fabric.save(flags.save, state)
    fabric.print(f"done: loss {losses[0]:.4f} -> {losses[-1]:.4f}, accuracy {accuracy:.3f}")
    return [*losses, *norms, accuracy]


if __name__ == "__main__":
    main()
