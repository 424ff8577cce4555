"""What is asked of a captured graph. Graphs whose nodes are ordered by their arguments: equal for ranks whose sets of strings
have other orders. What they compute is compared in test_models.py.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from rannc_backend.capture.analysis import analyze, in_order_of_arguments
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


class Normed(nn.Module):
    """A layer with batch normalization of [rows, 4, *shape]."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape
        self.layer = nn.Linear(3, 4 * math.prod(shape))
        self.norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape)](4)

    def forward(self, x):
        return self.norm(self.layer(x).view(-1, 4, *self.shape)).pow(2).mean()


@pytest.mark.parametrize(
    ("shape", "training", "num_rows"),
    [((), True, 2), ((), False, 1), ((1, 1), True, 2), ((2,), True, 1), ((3, 1), True, 1)],
)
def test_a_slice_has_the_rows_that_a_variance_needs(shape, training, num_rows):
    model = Normed(*shape).train(training)
    recorder, _ = capture_call(model, torch.randn(5, 3))
    assert analyze(recorder.graph).rows_per_slice == num_rows


@pytest.mark.parametrize(("rows", "micro_batches"), [(5, 4), (3, 2), (2, 2), (7, 3)])
def test_micro_batches_of_one_row_have_no_statistics(rows, micro_batches):
    """Their running variance would not be a number."""
    model = Normed()
    alone = copy.deepcopy(model)
    options = {"stage_compiler": "eager", "pipeline_num": micro_batches}
    x = torch.randn(rows, 3)
    torch.compile(model, backend="rannc", options=options)(x).backward()
    for part in x.tensor_split(min(micro_batches, rows // 2)):
        alone(part)
    torch.testing.assert_close(model.norm.running_var, alone.norm.running_var)
