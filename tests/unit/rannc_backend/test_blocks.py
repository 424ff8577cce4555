"""Blocks cover the graph in order, are cut where little crosses, and their flows are what a cut really carries."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rannc_backend.cost.cluster import local_cpu
from rannc_backend.cost.expressions import evaluate, value_bytes
from rannc_backend.ir.block_graph import INPUT_BLOCK, BlockGraph
from rannc_backend.partition.blocks import build_block_graph, choose_cuts
from rannc_backend.partition.stage_costs import StageCosts, useful_micro_batches
from rannc_backend.partition.staged_nodes import StagedGraph, find_staged_nodes
from tests.unit.rannc_backend.planning_graphs import SplitModel, gpt2, split_model

ROWS = 8


class Normalized(nn.Module):
    """BatchNorm in training: its batch statistics must stay in one stage with what they update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

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


def blocks_of(name: str, max_blocks: int = 64) -> BlockGraph:
    item = model(name)
    return build_block_graph(
        staged_graph(name), item.inputs, item.split.outputs, item.needs_grad,
        device=local_cpu(1, memory_bytes=1).device, rows=ROWS, max_blocks=max_blocks,
    )  # fmt: skip


@pytest.mark.parametrize("max_blocks", [1, 3, 10, 64, 1000])
@pytest.mark.parametrize("name", ["gpt2", "tied", "normalized"])
def test_blocks_cover_the_staged_nodes_in_order(name: str, max_blocks: int) -> None:
    graph = blocks_of(name, max_blocks)
    assert len(graph.blocks) <= max_blocks
    assert [node for block in graph.blocks for node in block.nodes] == [node.name for node in staged_graph(name).nodes]
    assert [block.index for block in graph.blocks] == list(range(len(graph.blocks)))


@pytest.mark.parametrize("name", ["gpt2", "tied", "normalized"])
def test_flows_are_the_values_that_cross_between_blocks(name: str) -> None:
    graph = blocks_of(name, 12)
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    expected: dict[str, tuple[int, set[int]]] = {}
    for node in model(name).split.rowwise.graph.nodes:
        producer = block_of.get(node.name, INPUT_BLOCK)
        readers = {block_of[user.name] for user in node.users if user.name in block_of} - {producer}
        is_input = node.op == "placeholder" and node.name in {i.name for i in model(name).inputs if i.kind == "batch"}
        if readers and (is_input or node.name in block_of):
            expected[node.name] = (producer, readers)
    assert {flow.name: (flow.producer, set(flow.consumers)) for flow in graph.flows} == expected
    for flow in graph.flows:
        assert flow.needs_grad == (flow.name in model(name).needs_grad)


def test_layers_end_where_blocks_end() -> None:
    graph = blocks_of("gpt2", 20)
    lasts = {block.modules[-1] for block in graph.blocks}
    assert {f"transformer.h.{layer}" for layer in range(4)} <= lasts, [block.modules for block in graph.blocks]
    # Only the hidden state crosses the end of a layer.
    for block in graph.blocks:
        if block.modules[-1] in {"transformer.h.0", "transformer.h.1"} and "mlp" in " ".join(block.modules):
            crossing = [f for f in graph.flows if 0 <= f.producer <= block.index < f.consumers[-1]]
            assert len(crossing) == 1


def test_tied_parameters_are_one_and_in_both_blocks() -> None:
    graph = blocks_of("tied")
    readers = [block.index for block in graph.blocks if "table.weight" in block.parameters]
    assert len(readers) == 2 and readers[0] == 0
    assert [use.name for use in graph.parameters] == sorted(use.name for use in graph.parameters)
    assert {use.name: use.num_bytes for use in graph.parameters}["table.weight"] == 11 * 4 * 4


def test_batch_statistics_never_cross_a_cut() -> None:
    graph = blocks_of("normalized")
    staged = staged_graph("normalized")
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    assert staged.fixed, "the model has no batch statistics: nothing is tested"
    for node in staged.fixed:
        assert {block_of[user.name] for user in node.users if user.name in block_of} <= {block_of[node.name]}
    updated = [name for block in graph.blocks for name in block.updated_buffers]
    assert sorted(updated) == [f"layers.{n}.{b}" for n in (1, 4) for b in ("num_batches_tracked", "running_mean", "running_var")]


def test_a_value_that_is_not_row_wise_keeps_its_readers_in_its_block() -> None:
    item, staged = model("tied"), staged_graph("tied")
    source = next(node for node in staged.nodes if "tanh" in node.name)
    build = functools.partial(
        build_block_graph, inputs=item.inputs, outputs=item.split.outputs, needs_grad=item.needs_grad,
        device=local_cpu(1, memory_bytes=1).device, rows=ROWS,
    )  # fmt: skip

    def blocks_with(fixed: frozenset) -> set[int]:
        graph = build(replace(staged, fixed=fixed))
        block_of = {node: block.index for block in graph.blocks for node in block.nodes}
        return {block_of[node.name] for node in [source, *source.users]}

    assert len(blocks_with(frozenset())) > 1
    assert len(blocks_with(frozenset([source]))) == 1


def test_cuts_are_balanced_and_few_values_cross() -> None:
    seconds = np.ones(40)
    crossing = np.full(40, 5.0)
    crossing[9::10] = 1.0
    allowed = np.ones(40, dtype=bool)
    bounds = choose_cuts(seconds, crossing, np.zeros(40, dtype=bool), allowed, max_blocks=4)
    assert bounds == [0, 9, 19, 29, 40]
    allowed[19] = False
    assert 19 not in choose_cuts(seconds, crossing, np.zeros(40, dtype=bool), allowed, max_blocks=4)


def test_long_graphs_are_cut_quickly_and_at_good_places() -> None:
    num_atoms = 20_000
    crossing = np.full(num_atoms, 4.0)
    crossing[::100] = 1.0
    allowed = np.ones(num_atoms, dtype=bool)
    bounds = choose_cuts(np.ones(num_atoms), crossing, np.ones(num_atoms, dtype=bool), allowed, max_blocks=64)
    assert len(bounds) == 65 and all(bound % 100 == 0 for bound in bounds)
    sizes = np.diff(bounds)
    assert sizes.max() <= 2 * num_atoms / 64


def interval_costs(name: str, num_devices: int = 4, rows: int = 16) -> StageCosts:
    return StageCosts(
        graph=blocks_of(name, 12), cluster=local_cpu(num_devices, memory_bytes=10**9), batch_rows=rows,
        micro_batches=useful_micro_batches(rows, 1, 8), schedule="1f1b", optimizer_factor=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tied", "normalized"])
def test_intervals_hold_the_parameters_and_receive_the_values_that_a_cut_gives_them(name: str) -> None:
    costs = interval_costs(name)
    graph, staged = costs.graph, staged_graph(name)
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    sizes = {use.name: use.num_bytes for use in graph.parameters}
    batch = {item.name for item in model(name).inputs if item.kind == "batch"}
    for begin in range(len(graph.blocks)):
        for end in range(begin + 1, len(graph.blocks) + 1):
            inside = {n for n in staged.nodes if begin <= block_of[n.name] < end}
            names = {name for block in graph.blocks[begin:end] for name in block.parameters}
            others = {name for block in graph.blocks[:begin] + graph.blocks[end:] for name in block.parameters}
            assert costs.parameter_bytes[begin, end] == sum(sizes[name] for name in names)
            assert costs.shared_bytes[begin, end] == sum(sizes[name] for name in names & others)
            read = {a for n in inside for a in n.all_input_nodes if (a in staged.reads and a not in inside) or a.name in batch}
            received = evaluate([value_bytes(n.meta["val"]) for n in read], costs.rows.tolist()).sum(axis=0) if read else 0
            np.testing.assert_allclose(costs.received[begin, end], received)
            kept = {n for n in inside if any(u in staged.reads and u not in inside for u in n.users)}
            sent = evaluate([value_bytes(n.meta["val"]) for n in kept], costs.rows.tolist()).sum(axis=0) if kept else 0
            np.testing.assert_allclose(costs.sent[begin, end], sent)


def test_the_parts_of_a_stage_add_up_to_what_the_search_compares() -> None:
    costs = interval_costs("tied")
    problem = costs.problem(1e9)
    for begin, end, replicas, number, to_end in [(0, 3, 2, 4, 2), (2, 7, 1, 8, 1), (0, len(costs.graph.blocks), 4, 1, 1)]:
        parts = costs.stage_cost(begin, end, replicas, number, to_end)
        place = (begin, end, replicas)
        tables = costs.tables(number)
        total = parts.forward_seconds + parts.backward_seconds + parts.transfer_seconds
        assert total == pytest.approx(tables.seconds[place], rel=1e-4)
        assert parts.allreduce_seconds == pytest.approx(problem.allreduce_seconds[place], rel=1e-4)
        in_flight = min(number, to_end)
        compared = tables.fixed_bytes[place] + in_flight * tables.flight_bytes[place]
        assert 0 <= parts.peak_bytes - compared <= 5 + in_flight  # each part is rounded up, and none is left out


def test_only_useful_numbers_of_micro_batches_are_tried() -> None:
    assert useful_micro_batches(8, 1, 32) == (1, 2, 3, 4, 8)
    assert useful_micro_batches(8, 3, 3) == (3,)
    assert useful_micro_batches(3, 8, 8) == (3,)
    assert useful_micro_batches(1, 1, 32) == (1,)
