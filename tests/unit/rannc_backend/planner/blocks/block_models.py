"""Models for tests of blocks and their costs: exported, split and cut into blocks, each once.

In: names. Out: `SplitModel`s, `StagedGraph`s and `BlockGraph`s.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.planner.blocks.cut_blocks import build_block_graph
from rannc_backend.planner.blocks.staged_nodes import StagedGraph, find_staged_nodes
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, gpt2, split_model

ROWS = 8


class Normalized(nn.Module):
    """BatchNorm in training: its batch statistics must stay in one stage with what they update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """A table used at both ends, a value used much later, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.table(ids)
        x = first
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + first), x


@functools.lru_cache
def model(name: str) -> SplitModel:
    if name == "gpt2":
        module, batch = gpt2(num_layers=4)
        return split_model(module, batch)
    if name == "tied":
        return split_model(Tied(), {"ids": torch.zeros(4, 3, dtype=torch.int64)})
    return split_model(Normalized(), {"x": torch.randn(4, 4)})


def staged_graph(name: str) -> StagedGraph:
    split = model(name).split
    return find_staged_nodes(split.rowwise, split.layouts, model(name).inputs)


def blocks_of(name: str, max_blocks: int = 160) -> BlockGraph:
    item = model(name)
    return build_block_graph(
        staged_graph(name), item.inputs, item.split.outputs, item.needs_grad,
        device=local_cpu(1, memory_bytes=1).device, rows=ROWS, max_blocks=max_blocks,
    )  # fmt: skip
