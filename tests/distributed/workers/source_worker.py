"""One rank of a job whose parameters come from a function that fails on the rank that gives them to the other.

usage: source_worker.py
"""

from __future__ import annotations

import torch
from torch import nn

import rannc_backend


def main() -> None:
    """Two replicas; the second takes the values of the first, which cannot be had."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}

    def value(name: str) -> torch.Tensor:
        if rannc_backend.get_rank() == 0:
            raise ValueError("the disk is gone")
        return torch.ones(shapes[name])

    rannc_backend.materialize_by_stage(net, value)
    model = torch.compile(net, backend="rannc", options={"stage_replicas": "2"})
    model(torch.ones(4, 8))


if __name__ == "__main__":
    main()
