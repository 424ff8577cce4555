"""Graphs whose nodes are ordered by their arguments: equal for ranks whose sets of strings have other orders. What they
compute is compared in test_models.py.
"""

from __future__ import annotations

import torch
from torch import nn

from rannc_backend.capture.analysis import in_order_of_arguments
from tests.unit.rannc_backend.capture.capture_harness import capture_call, fresh_dynamo


class Named(nn.Module):
    """Goes through names as a model does through a set of strings: in another order in each process."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.First, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        values = {name: getattr(torch, name)(x) * torch.tensor([len(name), 1.0]).sum() for name in self.names}
        return self.First(values[min(values)]) + self.second(values[max(values)])


def test_nodes_are_ordered_by_their_arguments_alone():
    graphs = []
    torch.manual_seed(0)
    for names in (("sin", "cos"), ("cos", "sin"), ("tan", "cos")):
        with fresh_dynamo(begins=True):
            recorder, _ = capture_call(Named(names), torch.randn(4, 3))
        graphs.append(recorder.graph)
    assert len({graph.fingerprint for graph in graphs}) == 3
    first, turned, other = (in_order_of_arguments(graph) for graph in graphs)
    assert first.fingerprint == turned.fingerprint != other.fingerprint
    assert str(first.graph_module.graph) == str(turned.graph_module.graph)
    assert [item.name for item in first.inputs] == [item.name for item in turned.inputs]
    assert in_order_of_arguments(first).fingerprint == first.fingerprint
