"""AutoDist's example configurations, each training a small transformer on the ranks that there are.

mpirun -np 4 python examples/autodist.py

The configurations are those of AutoDist's document, with meshes, stages, groups and batches for these ranks. With --check
each step is also computed by one process, in float64, and the losses must be equal. --dry-run NAME plans one of them for
the devices that the document names, without training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from reporting import rank_and_world
from torch import Tensor, nn

from rannc_backend.autodist import AutoDistConfig

_DRY_RUN_DEVICES = 8
_PRECISION = 1e-12


class Layer(nn.Module):
    """An attention of the width alone, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(torch.relu(self.attention(x)))


class Tower(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(width), Layer(width))
        self.decoder = nn.Sequential(Layer(width), Layer(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Transformer(nn.Module):
    """Towers, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Tower(width), Tower(width)])

    def forward(self, x: Tensor) -> Tensor:
        for tower in self.layer:
            x = tower(x)
        return x


class Model(nn.Module):
    """The loss is part of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transformer = Transformer(width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.transformer(x), target)


def configurations(world: int, *, batch: int) -> dict[str, AutoDistConfig]:
    """By name, for so many ranks and rows of a step."""
    stages = min(4, world)
    return {
        "basic": AutoDistConfig(
            task_name="my_experiment", memory_constraint=32, recompute_modules="transformer.layer"
        ),
        "high_memory": AutoDistConfig(
            task_name="large_model_training",
            memory_constraint=80,
            recompute_modules="transformer.layer",
            zero_stage=1,
            zero_ngroups=min(4, world),
            opt_resident_coef=6,
            opt_transient_coef=2,
            topk=50,
        ),
        "pipeline": AutoDistConfig(
            task_name="pipeline_training",
            pipeline_pivots="encoder,decoder",
            pipeline_nstages=stages,
            pipeline_scheduler="1f1b",
            # So few micro-batches leave more idle than the document's tenth.
            max_pipeline_bubble_ratio=0.6,
            mesh_row=1,
            mesh_col=world,
            micro_batch_size=batch // 4,
            update_freq=4,
        ),
        "efficient": AutoDistConfig(
            task_name="efficient_training",
            is_train=True,
            consider_mem=True,
            memory_constraint=24,
            recompute_modules="attention,mlp",
            solver="ilp",
            topk=10,
        ),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare with one process, in float64")
    parser.add_argument(
        "--dry-run", metavar="NAME", help=f"plan this one for {_DRY_RUN_DEVICES} devices, and end"
    )
    return parser.parse_args(argv)


def train(config: AutoDistConfig | dict[str, Any], flags: argparse.Namespace) -> list[float]:
    """The losses of all steps; raises where --check finds others than one process has."""
    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = Model(flags.width).to(torch.float64 if flags.check else torch.float32)
    plain = copy.deepcopy(model)
    dtype = model.transformer.layer[0].encoder[0].mlp.weight.dtype
    compiled = torch.compile(model, backend="rannc", options=config)
    pairs = [(module, torch.optim.Adam(module.parameters(), lr=1e-3)) for module in (model, plain)]
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(flags.steps):
        x, target = torch.randn(2, world * flags.batch, flags.width, generator=generator).to(dtype)
        own = slice(rank * flags.batch, (rank + 1) * flags.batch)
        pairs[0][1].zero_grad()
        loss = compiled(x[own], target[own])
        loss.backward()
        pairs[0][1].step()
        losses.append(loss.item())
        if flags.check:
            pairs[1][1].zero_grad()
            wanted = plain(x, target)
            wanted.backward()
            pairs[1][1].step()
            if abs(losses[-1] - wanted.item()) > _PRECISION * abs(wanted.item()):
                raise SystemExit(f"rank {rank}: loss {losses[-1]!r}, and {wanted.item()!r} in one process")
    return losses


def infer(flags: argparse.Namespace) -> float:
    """The loss of a model that is planned for inference; raises as `train` does."""
    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = Model(flags.width).to(torch.float64 if flags.check else torch.float32)
    dtype = model.transformer.layer[0].encoder[0].mlp.weight.dtype
    x, target = torch.randn(2, world * flags.batch, flags.width).to(dtype)
    wanted = model(x, target).item()
    own = slice(rank * flags.batch, (rank + 1) * flags.batch)
    config = AutoDistConfig(task_name="inference", is_train=False, pipeline_nstages=min(2, world))
    with torch.no_grad():
        found = torch.compile(model, backend="rannc", options=config)(x[own], target[own]).item()
    if flags.check and abs(found - wanted) > _PRECISION * abs(wanted):
        raise SystemExit(f"rank {rank}: loss {found!r}, and {wanted!r} in one process")
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train under each configuration, or plan one; give the losses of all steps by configuration."""
    flags = parse(argv)
    rank, world = rank_and_world()
    if flags.dry_run:
        size = _DRY_RUN_DEVICES
        config = configurations(size, batch=size * flags.batch)[flags.dry_run]
        train({**config.options(), "partitioning_dry_run_np": size, "cluster": "a100-80gb"}, flags)
    found = {}
    for name, config in configurations(world, batch=world * flags.batch).items():
        found[name] = losses = train(config, flags)
        torch.compiler.reset()
        if rank == 0:
            checked = ", as in one process" if flags.check else ""
            print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}{checked}", flush=True)
    loss = infer(flags)
    if rank == 0:
        print(f"inference: loss {loss:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
