"""Which values need gradients, by autograd's own word."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rannc_backend.passes.batch.differentiability import (
    Argument,
    gradient_sources,
    outputs_by_value,
    values_reached_by_grad,
)
from tests.unit.passes.batch.batch_tracing import trace
from tests.unit.passes.batch.slice_runner import split_traced
from tests.unit.passes.choosing_code import doubling


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x)
        return self.second(y), y.argmax(-1), (y.detach() > 0).double()


def test_frozen_start_and_integer_values_need_none() -> None:
    graph = trace(Branches(), dict(x=torch.randn(5, 3)))
    first_weight, first_bias, second_weight, second_bias = graph.parameters
    module = graph.graph_module
    output, index, mask = module.graph.output_node().args[0]
    everything = outputs_by_value(module, graph.parameters).keys()
    assert {output.name, *graph.parameters} <= everything
    assert index.name not in everything and mask.name not in everything and graph.batch[0] not in everything
    assert everything == values_reached_by_grad(module.graph, graph.parameters)
    late = outputs_by_value(module, [second_weight]).keys()
    assert output.name in late and not {first_weight, first_bias, second_bias} & late
    first_products = [node.name for node in module.graph.nodes if str(node.target) == "aten.addmm.default"][
        :1
    ]
    assert not set(first_products) & late
    assert outputs_by_value(module, []) == {}


def test_what_only_gives_its_shape_needs_none() -> None:
    class Shapes(Branches):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return y + self.second(y).new_zeros(y.shape)

    graph = trace(Shapes(), dict(x=torch.randn(5, 3)))
    found = outputs_by_value(graph.graph_module, graph.parameters).keys()
    assert set(graph.parameters) & found == set(graph.parameters[:2])
    assert set(graph.parameters) <= values_reached_by_grad(graph.graph_module.graph, graph.parameters)


def test_a_value_knows_the_outputs_that_bring_its_gradient() -> None:
    class Heads(Branches):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.first(x)
            return y.tanh(), self.second(y), self.second(y.detach()).sigmoid()

    graph = trace(Heads(), dict(x=torch.randn(5, 3)))
    names = [node.name for node in graph.graph_module.graph.output_node().args[0]]
    found = outputs_by_value(graph.graph_module, graph.parameters)
    first_weight, _, second_weight, _ = graph.parameters
    assert found[first_weight] == set(names[:2])
    assert found[second_weight] == set(names[1:])
    assert [found[name] for name in names] == [{name} for name in names]


def test_tuples_and_batch_norm_in_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    graph = trace(model, dict(input=torch.randn(5, 3)))
    found = outputs_by_value(graph.graph_module, graph.parameters).keys()
    outputs = graph.graph_module.graph.output_node().args[0]
    assert outputs[0].name in found
    assert not {item.name for item in outputs[1:]} & found, "running statistics have no gradient"


def test_sizes_stay_symbolic() -> None:
    class Numbered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[torch.arange(x.shape[0]), x.long()[:, 0] * 0]

    graph = trace(Numbered(), dict(x=torch.randn(5, 3)))
    outputs_by_value(graph.graph_module, graph.batch)
    split_traced(graph)
    assert graph.rows_symbol not in graph.fake_mode.shape_env.replacements


def test_a_way_through_code_as_written_ends_at_its_arguments() -> None:
    class Through(Branches):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.first(x)
            one, other = doubling([y, self.second(y)], [])
            return one.tanh(), other.tanh(), y.sin()

    graph = trace(Through(), dict(x=torch.randn(5, 3)))
    first, second, beside = (node.name for node in graph.graph_module.graph.output_node().args[0])
    found = gradient_sources(graph.graph_module, graph.parameters)
    first_weight, _, second_weight, _ = graph.parameters
    call = next(node for node in graph.graph_module.graph.nodes if node.target is doubling)
    assert found.outputs[first_weight] == {first, second, beside}
    assert found.outputs[second_weight] == {first, second}, "for all that the graph tells"
    assert found.nearest[second_weight] == {Argument(call.name, 1)}
    assert found.nearest[first_weight] == {beside, Argument(call.name, 0), Argument(call.name, 1)}
    results = {user.args[1]: found.nearest[user.name] for user in call.users}
    assert results == {0: {first}, 1: {second}}
