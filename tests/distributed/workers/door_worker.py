"""One rank of a job that trains a small model and tells what listens for it.

usage: door_worker.py FOLDER STAGE_REPLICAS [until-stopped]

Writes FOLDER/<rank>.json: the losses, and what listens (of this process, on rank 0 of its children too). With
"until-stopped" the steps go on until there is FOLDER/stop. Each step is a line in FOLDER/steps<rank>.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch

NUM_STEPS, NUM_ROWS = 6, 12


class Network(torch.nn.Module):
    """Loss inside, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        ).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(x), y)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_ROWS, 8, dtype=torch.float64, generator=generator)
    return x, torch.sin(3 * x)


def losses_of_one_process(num_steps: int = NUM_STEPS) -> list[float]:
    """What one process gets."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return [train(model, optimizer, batch(step)) for step in range(num_steps)]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: tuple[torch.Tensor, ...]) -> float:
    optimizer.zero_grad()
    loss = model(*rows)
    loss.backward()
    optimizer.step()
    return loss.item()


def listening(process: psutil.Process) -> list[list[str]]:
    """[address, name] of all that listens, or has a name as a Unix socket."""
    found = []
    for connection in process.net_connections("all"):
        if connection.status == "LISTEN" or (not connection.raddr and connection.laddr):
            address = (
                connection.laddr
                if isinstance(connection.laddr, str)
                else f"{connection.laddr.ip} {connection.laddr.port}"
            )
            found.append([connection.family.name, address])
    return found


def main() -> None:
    folder, replicas, until_stopped = Path(sys.argv[1]), sys.argv[2], "until-stopped" in sys.argv
    # What the launcher has open is its own, also in its children.
    inherited = listening(psutil.Process())
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    compiled = torch.compile(
        model,
        backend="rannc",
        options={"stage_replicas": replicas, "pipeline_num": 2, "stage_compiler": "eager"},
    )
    rank, size = (
        int(os.environ.get(mpi, os.environ.get(other, "0")))
        for mpi, other in (("PMI_RANK", "RANK"), ("PMI_SIZE", "WORLD_SIZE"))
    )
    losses: list[float] = []
    while len(losses) < NUM_STEPS or until_stopped:
        part = NUM_ROWS // size
        x, y = batch(len(losses))
        losses.append(
            train(
                compiled, optimizer, (x[rank * part : (rank + 1) * part], y[rank * part : (rank + 1) * part])
            )
        )
        with (folder / f"steps{rank}").open("a") as file:
            file.write(f"{time.time()}\n")
        if until_stopped and stop_is_asked(folder):
            break
    processes = [psutil.Process(), *(psutil.Process().children(recursive=True) if rank == 0 else [])]
    listens = [entry for process in processes for entry in listening(process) if entry not in inherited]
    names = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    told = {
        "losses": losses,
        "listening": listens,
        "processes": [process.name() for process in processes],
        "interfaces": names,
    }
    (folder / f"{rank}.json").write_text(json.dumps(told))
    print(f"ok {rank}")


def stop_is_asked(folder: Path) -> bool:
    asked = torch.tensor(int((folder / "stop").exists()))
    torch.distributed.broadcast(asked, 0)
    return bool(asked)


if __name__ == "__main__":
    main()
