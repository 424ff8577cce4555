"""The shortest complete example: a deep MLP that is cut into stages by itself.

mpirun -np 4 python examples/tutorial.py --hidden 2048 --layers 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from reporting import Progress, rank_and_world
from torch import Tensor, nn


class Mlp(nn.Module):
    """Equal layers, one after the other."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stage-compiler", default="inductor" if torch.cuda.is_available() else "eager")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the losses of all steps."""
    flags = parse(argv)
    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = Mlp(flags.hidden, flags.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {
        "pipeline_num": flags.micro_batches,
        "partition_num": flags.stages,
        "stage_compiler": flags.stage_compiler,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    progress = Progress(what="rows", every=5)
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(flags.batch, flags.hidden, generator=generator)
    target = torch.rand(flags.batch, flags.hidden, generator=generator)
    for _ in range(flags.steps):
        optimizer.zero_grad()
        loss = F.mse_loss(compiled(x), target)
        loss.backward()
        optimizer.step()
        progress.step(loss.item(), world * flags.batch)
    progress.end()
    return progress.losses


if __name__ == "__main__":
    main()
