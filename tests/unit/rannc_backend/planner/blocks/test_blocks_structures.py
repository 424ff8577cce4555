"""Equal layers are recognised: repeats in a line of kinds, and blocks of one structure, which cost the same
and are few.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rannc_backend.ir.block_graph import Block, BlockGraph
from rannc_backend.planner.blocks.atom_graph import reorder
from rannc_backend.planner.blocks.cut_blocks import build_block_graph
from rannc_backend.planner.blocks.line_cuts import crossing_bytes
from rannc_backend.planner.blocks.repeats import Repeat, find_repeats
from rannc_backend.planner.blocks.staged_nodes import find_staged_nodes
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import operator_seconds
from tests.choice import mostly
from tests.unit.rannc_backend.planner.blocks.atom_graphs import graph_of, line_cuts, slowest_stage
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, bert, gpt2, llama, split_model

MODELS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "bert": bert, "llama": llama}
NUM_LAYERS = 6  # of the models of linear layers
DEVICE = local_cpu(1, memory_bytes=1).device


def blocks_of(item: SplitModel, max_blocks: int) -> BlockGraph:
    staged = find_staged_nodes(item.split.rowwise, item.split.layouts, item.inputs)
    return build_block_graph(
        staged, item.inputs, item.split.outputs, item.needs_grad, device=DEVICE, rows=8, max_blocks=max_blocks
    )  # fmt: skip


@functools.lru_cache
def transformer(name: str, num_layers: int) -> SplitModel:
    return split_model(*MODELS[name](num_layers=num_layers))


def by_layer(graph: BlockGraph) -> dict[str, tuple[str, ...]]:
    """Structures of the blocks that lie in one layer alone, by the layer's name."""
    found: dict[str, tuple[str, ...]] = {}
    for block in graph.blocks:
        layers = {".".join(path.split(".")[:4]) for path in block.modules}
        layers = {name.split(".attention")[0].split(".self_attn")[0].split(".mlp")[0] for name in layers}
        if len(layers) == 1:
            found[next(iter(layers))] = (*found.get(next(iter(layers)), ()), block.structure)
    return found


@pytest.mark.parametrize("name", mostly(MODELS, ["gpt2"]))
def test_twice_as_many_layers_have_no_more_structures(name: str) -> None:
    few, many = (blocks_of(transformer(name, num_layers), 6 * num_layers + 8) for num_layers in (4, 8))
    counts = [len({block.structure for block in graph.blocks}) for graph in (few, many)]
    assert len(many.blocks) >= 1.6 * len(few.blocks) and counts[1] <= counts[0] + 1, counts
    assert counts[1] < 0.6 * len(many.blocks)


@pytest.mark.parametrize("name", mostly(MODELS, ["gpt2"]))
def test_one_structure_is_enough_for_layers_that_are_whole_blocks(name: str) -> None:
    graph = blocks_of(transformer(name, 6), 9)
    structures = [block.structure for block in graph.blocks]
    most = max(structures.count(structure) for structure in structures)
    assert most >= 4, structures


def costs(block: Block, graph: BlockGraph) -> list[float]:
    rows = [1, 3, 8]
    sizes = {use.name: (use.num_bytes, use.trainable) for use in graph.parameters}
    seconds = [array.sum(axis=0) for array in operator_seconds(block.operators, DEVICE, rows)]
    names = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")
    sums = [evaluate([getattr(item, name) for item in block.operators], rows).sum(axis=0) for name in names]
    amounts = np.concatenate([evaluate([block.saved_bytes], rows), sums])
    workspace = evaluate(block.workspace_bytes, rows).max(axis=0, initial=0.0)
    parameters = sorted(sizes[name] for name in block.parameters)
    return [
        *np.concatenate([*seconds, amounts.ravel(), workspace]).tolist(),
        *(float(x) for pair in parameters for x in pair),
    ]


@pytest.mark.parametrize("max_blocks", [11, 30, 160])
@pytest.mark.parametrize("name", mostly(MODELS, ["gpt2"]))
def test_blocks_of_one_structure_cost_the_same(name: str, max_blocks: int) -> None:
    graph = blocks_of(transformer(name, 6), max_blocks)
    known: dict[str, list[float]] = {}
    for block in graph.blocks:
        assert costs(block, graph) == pytest.approx(known.setdefault(block.structure, costs(block, graph)))
    assert len(known) < len(graph.blocks)


@pytest.mark.parametrize("name", mostly(MODELS, ["gpt2"]))
def test_models_are_not_cut_worse_than_their_line_as_it_is(name: str) -> None:
    item = transformer(name, 6)
    atoms, blocks = blocks_of(item, 10**6), blocks_of(item, 160)
    seconds = [
        sum(array.sum() for array in operator_seconds(atom.operators, DEVICE, [8])) for atom in atoms.blocks
    ]
    sizes = evaluate([flow.num_bytes for flow in atoms.flows], [8])[:, 0]
    edges = [
        (flow.producer, flow.consumers, size)
        for flow, size in zip(atoms.flows, sizes, strict=True)
        if flow.producer >= 0
    ]
    line = graph_of(seconds, edges)
    in_module = np.array([False, *(a.modules == b.modules for a, b in itertools.pairwise(atoms.blocks))])
    before = line_cuts(line.seconds, crossing_bytes(line)[:-1], in_module, max_blocks=64)
    atom_of = {node: atom.index for atom in atoms.blocks for node in atom.nodes}
    order = list(dict.fromkeys(atom_of[node] for block in blocks.blocks for node in block.nodes))
    now = [0, *itertools.accumulate(len({atom_of[node] for node in block.nodes}) for block in blocks.blocks)]
    for num_stages in (2, 3, 4, 8):
        for seconds_per_byte in (0.0, 1e-10, 1e-9):
            least = slowest_stage(line, before, num_stages, seconds_per_byte)
            assert slowest_stage(reorder(line, order), now, num_stages, seconds_per_byte) <= 1.005 * least


class Layers(nn.Module):
    """Equal layers but for the activation of one, the width of none."""

    def __init__(self, *activations: nn.Module, frozen: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 8)) for activation in activations
        )
        if frozen is not None:
            self.layers[frozen].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Renamed(nn.Module):
    """The same under other names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.other = inner

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.other(features)


class Wired(nn.Module):
    """Layers of the same operators on the same shapes, at the same cost; in those of `turned` the last one
    reads them in another order.
    """

    def __init__(self, turned: set[int]) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))
        self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            one, other = first(x), last(x)
            x = other - one if number in self.turned else one - other
        return x


def layer_structures(
    model: nn.Module, argument: str = "x", max_blocks: int = NUM_LAYERS, dtype: torch.dtype = torch.float32
) -> list[str]:
    item = split_model(model.to(dtype), {argument: torch.zeros(4, 8, dtype=dtype)})
    return [block.structure for block in blocks_of(item, max_blocks).blocks]


def activations(**others: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = [nn.Tanh() for _ in range(NUM_LAYERS)]
    for place, activation in others.items():
        found[int(place[1:])] = activation
    return found


@functools.lru_cache
def usual_structures() -> tuple[str, ...]:
    return tuple(layer_structures(Layers(*activations())))


def test_names_do_not_matter() -> None:
    structures = usual_structures()
    assert len(structures) == NUM_LAYERS and len(set(structures)) <= 3, structures
    assert tuple(layer_structures(Renamed(Layers(*activations())), "features")) == structures


class Positions(nn.Module):
    """Makes a constant on the device of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + torch.arange(16, device=x.device))


def test_the_device_does_not_matter() -> None:
    def structures(device: str) -> list[str]:
        model = Layers(*(Positions() for _ in range(NUM_LAYERS))).to(device)
        item = split_model(model, {"x": torch.zeros(4, 8, device=device)})
        return [block.structure for block in blocks_of(item, NUM_LAYERS).blocks]

    assert structures("meta") == structures("cpu")


@pytest.mark.parametrize(
    "change",
    [{"_3": nn.Sigmoid()}, {"_3": nn.Softplus(beta=2.0)}, {"_3": nn.Sequential(nn.Tanh(), nn.Tanh())}],
)
def test_another_layer_has_another_structure(change: dict) -> None:
    usual, structures = usual_structures(), layer_structures(Layers(*activations(**change)))
    assert set(structures) - set(usual), structures
    assert len(set(structures) & set(usual)) >= 1, "the layers that did not change are the same"


def test_wiring_counts() -> None:
    usual, structures = layer_structures(Wired(set())), layer_structures(Wired({3}))
    assert len(structures) == len(usual) == NUM_LAYERS
    assert [old == new for old, new in zip(usual, structures, strict=True)] == [
        place != 3 for place in range(NUM_LAYERS)
    ]


def test_constants_gradients_and_dtypes_count() -> None:
    usual = set(usual_structures())
    one = set(layer_structures(Layers(*activations(_3=nn.Softplus(beta=2.0)))))
    assert one != set(layer_structures(Layers(*activations(_3=nn.Softplus(beta=3.0))))), (
        "a constant was left out"
    )
    assert not usual & set(layer_structures(Layers(*activations()), dtype=torch.float64))
    assert set(layer_structures(Layers(*activations(), frozen=3))) - usual


UNIT = st.lists(st.integers(0, 5), min_size=3, max_size=8)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(6, 9), max_size=5),
    UNIT,
    st.integers(2, 6),
    st.lists(st.integers(10, 13), max_size=5),
    UNIT,
    st.integers(0, 5),
)
def test_repeats_are_found(
    before: list[int], unit: list[int], count: int, between: list[int], other: list[int], num_others: int
) -> None:
    text = [*before, *unit * count, *between, *[20 + kind for kind in other] * num_others]
    repeats = find_repeats(
        text, 0, len(text), boundary_price=lambda cut: 0.0, is_worth=lambda begin, end: True
    )
    assert all(first.stop <= second.start for first, second in zip(repeats, repeats[1:], strict=False))
    for repeat in repeats:
        first = text[repeat.start : repeat.start + repeat.period]
        assert repeat.count >= 2 and text[repeat.start : repeat.stop] == first * repeat.count
    if count >= 3:
        covered = {place for repeat in repeats for place in range(repeat.start, repeat.stop)}
        start = len(before)
        assert len(covered & set(range(start, start + len(unit) * count))) >= len(unit) * (count - 1)


def test_repeats_begin_where_cuts_are_cheap_and_only_if_they_are_worth_it() -> None:
    text = [9, *[1, 2, 3, 4, 5] * 6, 8]
    found = functools.partial(find_repeats, text, 0, len(text))
    assert found(boundary_price=lambda cut: float(cut % 5 != 3), is_worth=lambda a, b: True) == [
        Repeat(start=3, period=5, count=5)
    ]
    assert found(boundary_price=lambda cut: 0.0, is_worth=lambda a, b: True) == [
        Repeat(start=1, period=5, count=6)
    ]
    assert found(boundary_price=lambda cut: 0.0, is_worth=lambda a, b: False) == []
