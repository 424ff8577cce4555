"""Every configuration of EPL's page, in its own words, on a small model: `mpirun -np 2 python examples/epl.py`.

Each is given to epl.init, a model is compiled and trained under it, and a line says what the plan makes of it.
"""

import argparse

import torch
from torch import Tensor, nn

import rannc_backend
import rannc_backend.epl as epl

WORDS, WIDTH, LENGTH = 64, 32, 8
CONFIGURATIONS = {
    "micro-batches": {"pipeline.num_micro_batch": 4},
    "stages": {"auto.auto_parallel": True, "pipeline.num_stages": 2, "pipeline.num_micro_batch": 4},
    "as GPipe": {
        "pipeline.num_stages": 2,
        "pipeline.num_micro_batch": 4,
        "pipeline.strategy": "PreferForward",
    },
    "automatic checkpoints": {"gradient_checkpoint.type": "auto"},
    "own checkpoints": {"gradient_checkpoint.type": "collection"},
    "zero": {"zero.level": "v1"},
    "offload": {"offload.level": "v0"},
    "amp": {"amp.level": "O1", "amp.loss_scale": "dynamic"},
    "amp, fixed scale": {"amp.level": "O1", "amp.loss_scale": 128},
    "updates in groups": {"optimizer.num_apply_group": 30},
}


class Model(nn.Module):
    """Four layers, whose outputs are marked for "own checkpoints"."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = rannc_backend.checkpoint_tensor(
                layer(hidden)
            )  # tf.add_to_collection("checkpoints", tensor)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def train(config: epl.Config, steps: int, batch: int) -> list[float]:
    """Losses of a model that is trained under a configuration."""
    epl.init(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    module = Model().to(device)
    model = torch.compile(module, backend="rannc")
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scaler = epl.scaler()  # does nothing without amp.level
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rannc_backend.get_rank())
        loss = model(torch.randint(0, WORDS, (batch, LENGTH), generator=generator).to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="rows per rank")
    parser.add_argument("--only", default="", help="configurations whose name has this")
    arguments = parser.parse_args()
    for name, items in CONFIGURATIONS.items():
        if arguments.only not in name:
            continue
        losses = train(epl.Config(items), arguments.steps, arguments.batch)
        if rannc_backend.get_rank() == 0:
            print(f"{name}: {items}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    files = [f"part-{index:05d}" for index in range(2 * rannc_backend.get_world_size() + 1)]
    epl.init(epl.Config({"io.slicing": True, "io.unbalanced_io_slicing": True}))
    print(f"rank {rannc_backend.get_rank()} reads {epl.slice_files(files)}", flush=True)


if __name__ == "__main__":
    main()
