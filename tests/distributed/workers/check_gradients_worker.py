"""An operator that gives other values when it runs for the third time: with a twin that keeps everything, that is when
its stage computes it again. On two ranks: `check_gradients_worker.py OPTIONS`, which are JSON. Says "trained" where nobody
has noticed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

NUM_CALLS: Counter[float] = Counter()


@torch.library.custom_op("docs::drifting", mutates_args=(), tags=(torch.Tag.pointwise,))
def drifting(values: torch.Tensor) -> torch.Tensor:
    NUM_CALLS[values.sum().item()] += 1
    return torch.tanh(values * (1 + 1e-3 * (NUM_CALLS[values.sum().item()] > 2)))


def keep_result(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (result,) = ctx.saved_tensors
    return gradient * (1 - result * result)


drifting.register_fake(lambda values: torch.empty_like(values))
drifting.register_autograd(backward, setup_context=keep_result)


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.docs.drifting(self.layer(x)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), Drifting(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh())).square().mean()


def main(options: dict[str, Any]) -> None:
    import rannc_backend

    torch.manual_seed(0)
    model = Model()
    options = {
        "partition_num": 2,
        "pipeline_num": 3,
        "stage_starts": "second",
        "costs": "analytic",
        "cluster": "generic-cpu",
        "stage_compiler": "eager",
        **options,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    rank, num_ranks = rannc_backend.get_rank(), rannc_backend.get_world_size()
    for batch in torch.randn(2, 6 * num_ranks, 4):
        compiled(batch.chunk(num_ranks)[rank]).backward()
    print("trained", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
