"""A training script as a user writes it: a model, one batch, some steps. Used by test_dry_run.py.

In: the environment alone. Out: the loss of each step on stdout; what it does not know about is
RANNC_PARTITIONING_DRY_RUN_NP.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rannc_backend.runtime.job import bootstrap


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), labels)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="rannc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(bootstrap.start().rank)
    x, labels = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
    for _ in range(2):
        optimizer.zero_grad()
        try:
            loss = compiled(x, labels)
        except Exception as error:
            print(f"failed: {error}", flush=True)
            # The first rank that ends would end the others before they have spoken.
            bootstrap.start().control.barrier()
            raise
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
