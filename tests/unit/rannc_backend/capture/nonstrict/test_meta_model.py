"""Capturing without computing: the same graph as a real call's, for models without memory too, and errors
that say what went wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rannc_backend.capture.nonstrict.arguments import Ranks, call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.capture.nonstrict.meta_model import _by_dynamo, capture_model
from rannc_backend.errors import GraphBreakError, ModelDevicesError, UnsupportedModelError
from tests.choice import mostly
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo
from tests.unit.rannc_backend.planner.planning_examples import SMALL, small_example

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo():
        yield


def _on_meta(name):
    with torch.device("meta"):
        return small_example(name)


_BY_DEFAULT = ("resnet",)  # the others train over ranks, or are planned on meta in test_planning.py


@pytest.mark.parametrize("name", mostly(SMALL, _BY_DEFAULT))
def test_a_model_on_meta_gives_the_graph_of_a_real_call_on_the_cpu(name):
    model, args, kwargs = small_example(name)
    recorder = Recorder()
    torch.compile(model, backend=recorder)(*args, **kwargs)
    torch._dynamo.reset()
    captured = capture_model(*_on_meta(name), device=CPU)
    assert captured.fingerprint == recorder.graphs[0].fingerprint
    kinds = {item.kind for item in captured.inputs if item.name.startswith("x_")}
    assert kinds == {"batch"}
    assert {node.meta["val"].device.type for node in captured.graph_module.graph.nodes if "val" in node.meta
            and isinstance(node.meta["val"], torch.Tensor)} == {"cpu"}  # fmt: skip


def test_nothing_is_computed_and_nothing_changes():
    calls = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            if not torch.compiler.is_compiling():
                calls.append(x)
            return self.norm(self.linear(x))

    model, x = Model(), torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        captured = capture_model(model, (x,), {})
    assert calls == [] and captured.buffer_updates and captured.root_module is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(item.requires_grad for item in captured.inputs)
    model(x)  # still the plain model
    assert len(calls) == 1


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("no such setting")


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else -x


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        breakpoint()
        return y * 2


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Constant(nn.Module):
    def forward(self, x):
        return 3


@pytest.mark.parametrize(
    ("model", "x", "error", "text"),
    [
        (Raises(), torch.zeros(4, 3), GraphBreakError, "the model raises KeyError"),
        (Prints(), torch.zeros(4, 3), GraphBreakError, "test_meta_model.py"),
        (
            Constant(),
            torch.zeros(4, 3),
            UnsupportedModelError,
            "Constant was called without computing anything",
        ),
        (Scale(), torch.zeros(4), UnsupportedModelError, "works for one batch size only"),
    ],
    ids=["raises", "breaks", "constant", "no batch"],
)
def test_what_cannot_be_captured_is_said_with_the_users_line(model, x, error, text):
    with pytest.raises(error, match=text):
        capture_model(model, (x,), {})


def test_a_path_is_that_of_the_values_that_are_given():
    graphs = [capture_model(Branches(), (torch.full((4, 3), sign),), {}).graph_module for sign in (1.0, -1.0)]
    x = torch.randn(5, 3)
    assert [torch.equal(graph(x)[0], factor * x) for graph, factor in zip(graphs, (2, -1))] == [True, True]


class Kept:
    """What a forward may give: an object of a class of its own."""

    def __init__(self, values):
        self.values, self.length = values, values[0].shape[1]


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return {"kept": Kept([y, y.exp()]), "loss": y.sum()}


def test_either_way_of_capture_gives_the_graph_that_plans_are_for():
    """An object whose attributes are outputs has another place among them in each."""
    model, x = Caching(), torch.randn(4, 3)
    captured = [capture_model(model, (x,), {}), _by_dynamo(model, (x,), {}, None)]
    assert captured[0].plan_fingerprint == captured[1].plan_fingerprint
    names = [[node.name for node in each.graph_module.graph.nodes] for each in captured]
    assert names[0] == names[1] and [item.name for item in captured[0].inputs] == [
        item.name for item in captured[1].inputs
    ]


def test_parameters_that_lie_elsewhere_are_traced_as_if_they_were_on_the_device() -> None:
    """As with option offload: parameters on the CPU, buffers and arguments on a device, for which "meta" stands."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for name, buffer in list(model.named_buffers()):
        if buffer.dim():
            model[1]._buffers[name.rpartition(".")[2]] = buffer.to("meta")
    call = call_of(model, (torch.empty(3, 4, device="meta"),), {})
    with pytest.raises(ModelDevicesError):
        capture_call(model, call)
    device = torch.device("meta")
    found = capture_call(model, call, Ranks(device=device)).recorded.captured
    nodes = found.graph_module.graph.nodes
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    counters = [value for value in values if value.device != device]
    assert len(values) > 9 and all(value.dim() == 0 for value in counters)
    assert {item.kind for item in found.inputs} >= {"parameter", "buffer", "batch"}
