"""Questions about graphs."""

from __future__ import annotations

import torch
from torch import fx

from rannc_backend.passes.graph_queries import (
    is_zeros,
    nearest_node,
    nodes_behind,
    output_values,
    placeholders,
)


def _names(nodes):
    return {node.name for node in nodes}


def test_questions():
    graph = fx.symbolic_trace(lambda x, y: (torch.relu(x), torch.relu(x) + y, None)).graph
    x, y = placeholders(graph)
    first, total, nothing = output_values(graph)
    assert (x.name, y.name, nothing) == ("x", "y", None)
    assert _names(nodes_behind([total])) == {"x", "y", "relu_1", "add"}
    assert _names(nodes_behind([total, first], stop=lambda node: node.name == "relu_1")) == {
        "y",
        "relu_1",
        "add",
        "relu",
        "x",
    }
    assert _names(nodes_behind([total], stop=lambda node: node.name == "relu_1")) == {"y", "relu_1", "add"}
    assert _names(nodes_behind([])) == set()


def test_the_nearest_node_is_of_the_same_module_or_fewest_edges_away():
    graph = fx.symbolic_trace(lambda x: (torch.relu(x) + 1) * 2).graph
    x, relu, add, mul, _ = graph.nodes
    relu.meta["module_path"] = mul.meta["module_path"] = "h.0"
    assert nearest_node(mul, lambda node: node in (add, relu)) is relu
    assert nearest_node(x, lambda node: node in (add, mul)) is add
    assert nearest_node(mul, lambda node: node is x) is x
    assert nearest_node(mul, lambda node: False) is None
    # The output node is no way from one value to another.
    pair = fx.symbolic_trace(lambda x, y: (torch.relu(x), torch.relu(y))).graph
    left, right = output_values(pair)
    assert nearest_node(left, lambda node: node is right) is None


def test_new_zeros_are_calls_that_make_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    assert is_zeros(graph.call_function(aten.new_zeros.default, (x, [2])))
    assert is_zeros(graph.call_function(aten.zeros.default, ([2],)))
    assert is_zeros(graph.call_function(aten.full.default, ([2], 0)))
    assert not is_zeros(graph.call_function(aten.full.default, ([2], 1)))
    assert not is_zeros(graph.call_function(aten.neg.default, (x,)))
    assert not is_zeros(x) and not is_zeros(0) and not is_zeros(None)
