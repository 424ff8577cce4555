"""Costs of operators, memory and transfers against torch's own counters and against hand counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rannc_backend.ir.block_graph import OperatorCost
from rannc_backend.planner.blocks.staged_nodes import find_staged_nodes
from rannc_backend.planner.cluster.cluster import Cluster, Device, Link
from rannc_backend.planner.cost.compute import operator_cost, operator_name
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.memory import saved_values
from rannc_backend.planner.cost.pricing import operator_seconds
from rannc_backend.planner.cost.tensor_sizes import value_bytes
from rannc_backend.planner.cost.transfer import (
    allreduce_seconds,
    allreduce_terms,
    message_memory,
    message_seconds,
    ring_terms,
    shared_allreduce_terms,
)
from tests import expert_models
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import generic_gpu, local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, split_model

ROWS = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(x.shape[0], 5, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3)
        self.back = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.second(self.first(x)))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)), (7,)),
    "attention": (Attention, (5, 8)),
    "convolution": (Filters, (3, 9, 9)),
}


def staged_costs(model: SplitModel) -> list[OperatorCost]:
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    return [operator_cost(node, model.needs_grad) for node in staged.nodes]


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    make, shape = MODELS[name]
    module = make()
    costs = staged_costs(split_model(module, {list_argument(module): torch.randn(4, *shape)}))
    forward = evaluate([sympy.Add(*(cost.forward_flops for cost in costs))], [ROWS])[0, 0]
    backward = evaluate([sympy.Add(*(cost.backward_flops for cost in costs))], [ROWS])[0, 0]
    x = torch.randn(ROWS, *shape)
    with FlopCounterMode(display=False) as counter:
        output = module(x).sum()
    assert forward == counter.get_total_flops() > 0
    with FlopCounterMode(display=False) as counter:
        output.backward()
    assert backward == counter.get_total_flops() > 0


def test_grouped_filters_see_their_group_only() -> None:
    # torch's counter takes the weight's gradient of a grouped convolution for that of a full one, hence by
    # hand.
    module = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4))
    (cost,) = [
        c
        for c in staged_costs(split_model(module, {"input": torch.randn(4, 8, 5, 5)}))
        if c.forward_flops != 0
    ]
    products = 2 * (8 * 3 * 3) * (2 * 3 * 3)
    np.testing.assert_array_equal(
        evaluate([cost.forward_flops, cost.backward_flops], [1, 3]), [[products, 3 * products]] * 2
    )


def list_argument(module: nn.Module) -> str:
    return "input" if isinstance(module, nn.Sequential) else "x"


def test_frozen_parameters_save_their_part_of_the_backward() -> None:
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    costs = {
        cost.name: cost
        for cost in staged_costs(split_model(module, {"input": torch.randn(4, 7)}))
        if cost.forward_flops != 0
    }
    first, second = costs.values()
    assert first.backward_flops == 0 and first.backward_bytes == 0
    assert (
        second.backward_flops == second.forward_flops
    )  # the weight's gradient only: nothing before it needs one


def test_views_cost_nothing_and_elementwise_operators_their_bytes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).view(x.shape[0], 2, 2)

    model = split_model(Model(), {"x": torch.randn(4, 4)})
    by_operator = {}
    for node in find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs).nodes:
        by_operator[operator_name(node)] = operator_cost(node, model.needs_grad)
    view, multiply = by_operator["view"], by_operator["mul"]
    assert view.forward_bytes == view.backward_bytes == view.num_forward_launches == 0
    assert evaluate([multiply.forward_bytes], [10])[0, 0] == (40 + 40 + 4) * 4
    assert multiply.forward_flops == 0 and multiply.num_backward_launches == 1


@pytest.mark.parametrize("name", ["expand", "mm", "view"])
def test_inputs_named_after_an_operator_are_none(name: str) -> None:
    # What one graph saves for the other is called as the node that made it.
    graph = torch.fx.Graph()
    given = graph.placeholder(name)
    given.meta["val"] = torch.empty(4, 8, device="meta")
    node = graph.call_function(torch.ops.aten.tanh.default, (given,))
    node.meta["val"] = torch.empty(4, 8, device="meta")
    assert operator_name(given) == "" and operator_name(node) == "tanh"
    assert operator_cost(node, ()).forward_bytes == 2 * 4 * 8 * 4


def test_the_gradient_of_a_table_is_dense() -> None:
    model = split_model(nn.Embedding(1000, 4), {"input": torch.zeros(4, 2, dtype=torch.int64)})
    (cost,) = [cost for cost in staged_costs(model) if cost.num_forward_launches]
    assert evaluate([cost.forward_bytes], [3])[0, 0] == 2 * 3 * 2 * 4 * 4
    assert evaluate([cost.backward_bytes], [3])[0, 0] == 2 * 3 * 2 * 4 * 4 + 1000 * 4 * 4


def test_seconds_are_the_longer_of_computing_and_moving_plus_the_launch() -> None:
    rows = sympy.Symbol("rows", positive=True, integer=True)
    zero = sympy.Integer(0)
    operator = OperatorCost(
        name="n", dtype="float32", forward_flops=100 * rows, backward_flops=200 * rows, forward_bytes=50 + rows,
        backward_bytes=zero, num_forward_launches=1, num_backward_launches=2,
    )  # fmt: skip
    device = Device(
        name="d",
        memory_bytes=1,
        flops_per_second=(("float32", 100.0),),
        memory_bytes_per_second=10.0,
        launch_seconds=0.25,
    )
    forward, backward = operator_seconds([operator], device, [1, 10])
    np.testing.assert_allclose(forward, [[5.1 + 0.25, 10 + 0.25]])
    np.testing.assert_allclose(backward, [[2 + 0.5, 20 + 0.5]])


def test_expressions_that_are_no_polynomials() -> None:
    rows = sympy.Symbol("rows", positive=True, integer=True)
    values = evaluate([rows**2 + 3, sympy.Max(rows, 5), sympy.floor(rows / 2), sympy.Integer(7)], [1, 9])
    np.testing.assert_array_equal(values, [[4, 84], [5, 9], [0, 4], [7, 7]])


def saved_names(module: nn.Module, shape: tuple[int, ...]) -> dict[str, float]:
    model = split_model(module, {list_argument(module): torch.randn(4, *shape)})
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    nodes = [value for value, _ in saved_values(staged.nodes, model.needs_grad)]
    names = [operator_name(node) for node in nodes]
    assert len(set(names)) == len(names), f"two values of one operator: {names}"
    return {name: evaluate([value_bytes(node.meta["val"])], [ROWS])[0, 0] for name, node in zip(names, nodes)}


def test_a_chain_of_elementwise_operators_saves_its_roots_and_what_a_product_reads() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            return self.down(0.5 * hidden * (1 + torch.tanh(0.8 * (hidden + 0.04 * hidden**3))))

    assert saved_names(Model(), (4,)) == {"addmm": ROWS * 16 * 4, "tanh": ROWS * 16 * 4, "mul": ROWS * 16 * 4}


def test_what_backward_keeps_without_parameters_to_train_is_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).requires_grad_(False)
    assert saved_names(module, (4,)) == {}


def test_a_linear_chain_saves_the_input_of_each_product_but_the_given_one() -> None:
    assert saved_names(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False)), (4,)) == {
        "mm": ROWS * 6 * 4
    }


def test_transfers() -> None:
    link = Link(latency_seconds=0.5, bytes_per_second=100)
    assert message_seconds(link, 0) == 0
    assert message_seconds(link, 200) == 2.5
    assert allreduce_seconds(link, 400, 1) == 0
    assert allreduce_seconds(link, 0, 4) == 0
    assert allreduce_seconds(link, 400, 4) == 6 * (0.5 + 1)


def _two_nodes() -> Cluster:
    near = Link(latency_seconds=1.0, bytes_per_second=1000.0)
    far = Link(latency_seconds=5.0, bytes_per_second=10.0)
    return replace(local_cpu(8, memory_bytes=1), devices_per_node=4, intra_node=near, inter_node=far)


def test_terms_of_an_all_reduce_follow_from_where_its_ranks_are() -> None:
    cluster = _two_nodes()
    near, far = cluster.intra_node, cluster.inter_node
    assert allreduce_terms(cluster, (2,)) == (0.0, 0.0)
    # 2 (n - 1) steps, each with 1 / n of the bytes.
    assert allreduce_terms(cluster, (0, 1, 2)) == ring_terms(near, 3) == (4.0, pytest.approx(4 / 3 / 1000))
    assert allreduce_terms(cluster, (4, 7)) == ring_terms(near, 2)
    assert allreduce_terms(cluster, (3, 4)) == ring_terms(far, 2) == (10.0, pytest.approx(0.1))
    # Uneven over the nodes: one ring over the slow link. Even: half a ring within, one between for half of
    # the bytes, half a ring within.
    assert allreduce_terms(cluster, (0, 1, 4)) == ring_terms(far, 3)
    assert allreduce_terms(cluster, (0, 1, 4, 5)) == (2.0 + 10.0, pytest.approx(1 / 1000 + 1 / 10 / 2))


def test_what_another_stage_reads_too_is_reduced_over_twice_as_many_ranks() -> None:
    cluster = _two_nodes()
    for ranks in ((0,), (0, 1), (0, 1, 2, 3)):
        assert shared_allreduce_terms(cluster, ranks) == ring_terms(cluster.intra_node, 2 * len(ranks))
    for ranks in ((3, 4), (0, 1, 4, 5)):
        assert shared_allreduce_terms(cluster, ranks) == ring_terms(cluster.inter_node, 2 * len(ranks))


def test_a_generic_gpu_is_faster_at_shorter_numbers() -> None:
    cluster = generic_gpu(
        16, devices_per_node=8, device_name="gpu", memory_bytes=80 * 2**30, num_multiprocessors=100
    )
    assert cluster.device.rate("bfloat16") > cluster.device.rate("float32") > cluster.device.rate("int64") > 0
    assert cluster.assumption().devices_per_node == 8


def test_a_local_cpu_shares_its_memory() -> None:
    assert local_cpu(1).device.memory_bytes // 4 == pytest.approx(local_cpu(4).device.memory_bytes, rel=1e-6)
    assert (
        isinstance(local_cpu(4, memory_bytes=5), Cluster)
        and local_cpu(4, memory_bytes=5).device.memory_bytes == 5
    )


def test_tokens_of_experts_are_products_of_as_many_rows() -> None:
    model = split_model(expert_models.Grouped(), {"x": expert_models.batch(4, 0).float()})
    costs = [cost for cost in staged_costs(model) if cost.name.startswith("products")]
    num_tokens = ROWS * expert_models.LENGTH * expert_models.NUM_CHOICES
    product = 2 * num_tokens * expert_models.WIDTH * expert_models.HIDDEN
    assert [cost.operator_class for cost in costs] == ["matmul"] * 2
    flops = [(cost.forward_flops, cost.backward_flops) for cost in costs]
    assert [tuple(evaluate(each, [ROWS])[:, 0]) for each in flops] == [(product, 2 * product)] * 2


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [((48, 16), (4, 16, 32), (48, 32)), ((16, 48), (48, 32), (4, 16, 32))],
    ids=["forward", "gradient of weights"],
)
def test_torchs_own_products_of_segments(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]
) -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("left", "right", "ends")]
    for node, shape in zip(nodes, (left, right, (4,)), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    product = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(nodes))
    product.meta["val"] = torch.empty(result, device="meta")
    assert operator_cost(product, ()).forward_flops == 2 * 48 * 16 * 32


@pytest.mark.parametrize(
    ("num_devices", "num_micro_batches", "expected"), [(1, 4, 0), (2, 4, 43), (2, 1, 13)]
)
def test_messages_on_their_way_take_memory_where_there_are_other_devices(
    num_devices: int, num_micro_batches: int, expected: int
) -> None:
    cluster = local_cpu(num_devices)
    assert message_memory(cluster, num_micro_batches, 8.0, 10.0, 7.0, 5.0) == expected
