"""The tutorial in RaNNC's form: a deep MLP, wrapped by RaNNCModule, trained over all ranks of mpirun.

    mpirun -np 8 python examples/tutorial_rannc.py --hidden 5000 --layers 100 --batch 64    # 2.5 billion
    parameters, as RaNNC's

A script written for RaNNC changes the import and nothing else. `tutorial.py` is the same with torch.compile.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from reporting import Progress
from torch import Tensor, nn, optim

import rannc_backend as pyrannc


class Net(nn.Module):
    """Equal layers, one after the other."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help. The backend's own options come from rannc_conf.toml and RANNC_<NAME>, as with
    RaNNC.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="rows per rank and step")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the losses of all steps."""
    flags = parse(argv)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    torch.manual_seed(0)
    model = Net(flags.hidden, flags.layers)  # stays on the host: each rank takes its own stages to its device
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    model = pyrannc.RaNNCModule(model, optimizer)

    if pyrannc.get_rank() == 0:
        print(f"{num_parameters:,} parameters over {pyrannc.get_world_size()} rank(s)", flush=True)
    generator = torch.Generator().manual_seed(1 + pyrannc.get_rank())
    x = torch.randn(flags.batch, flags.hidden, generator=generator).to(device)
    target = torch.rand(flags.batch, flags.hidden, generator=generator).to(device)
    progress = Progress(what="rows", every=5)
    for _ in range(flags.steps):
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, target)
        loss.backward()
        optimizer.step()
        progress.step(loss.item(), pyrannc.get_world_size() * flags.batch)
    pyrannc.barrier()
    progress.end()
    return progress.losses


if __name__ == "__main__":
    main()
