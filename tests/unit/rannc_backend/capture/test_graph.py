"""Capture: inputs told apart, names, gradients stopped where the model stops them, nothing left behind, one
hash for one model.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rannc_backend.ir.graph_input import StateInput
from tests.choice import mostly
from tests.unit.rannc_backend.capture.capture_harness import (
    Recorder,
    capture_call,
    fresh_dynamo,
    kinds,
    relative_error,
    run,
)
from tests.unit.rannc_backend.capture.capture_models import build

LENGTH = 6


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo(begins=True):
        torch.manual_seed(0)
        yield


def ops(recorder):
    return [
        str(node.target) for node in recorder.graph.graph_module.graph.nodes if node.op == "call_function"
    ]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, ids):
        return self.head(self.embedding(ids)) * self.scale


def test_inputs_are_described_with_all_their_names():
    model = Tied()
    model.embedding.weight.requires_grad_(False)
    recorder, _ = capture_call(model, torch.randint(0, 10, (4, 3)))
    captured = recorder.graph
    assert kinds(recorder) == {"x_ids": "batch", "embedding.weight": "parameter", "scale": "buffer"}
    weight = next(item for item in captured.inputs if item.kind == "parameter")
    assert weight.aliases == ("embedding.weight", "head.weight") and not weight.requires_grad
    for item, node in zip(
        captured.inputs, captured.graph_module.graph.find_nodes(op="placeholder"), strict=True
    ):
        assert node.name == item.name == node.target
        value = recorder.arguments[item.position]
        assert tuple(value.shape[1:]) == tuple(node.meta["val"].shape[1:])
    assert recorder.arguments[weight.position] is model.embedding.weight


def test_metadata_of_nodes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    recorder, _ = capture_call(Wrapped(model), torch.randn(4, 3))
    graph = recorder.graph.graph_module.graph
    paths = [
        node.meta["module_path"]
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    ]
    assert paths == ["inner.0", "inner.1.1"]
    lines = [
        node.meta.get("stack_trace") or ""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    ]
    assert len(lines) == 1 and "return self.inner(x) * 2" in lines[0] and Path(__file__).name in lines[0]
    rows = {str(symbol) for node in graph.nodes for symbol in free_symbols(node.meta.get("val"))}
    assert rows == {str(recorder.graph.rows_symbol)}
    assert all("mutable" not in str(node.target) for node in graph.nodes)


def free_symbols(value):
    if not isinstance(value, torch.Tensor):
        return set()
    return {
        symbol
        for size in value.shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("way", ["closure", "global", "method", "model.compile", "nested wrapper"])
def test_ways_to_compile(way):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    criterion = nn.MSELoss()
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    recorder = Recorder()
    root = model
    if way == "closure":
        result = torch.compile(lambda a, b: criterion(model(a), b), backend=recorder)(x, y)
    elif way == "global":
        scope = {"model": model, "criterion": criterion}
        exec("def step(a, b):\n    return criterion(model(a), b)\n", scope)
        result = torch.compile(scope["step"], backend=recorder)(x, y)
    elif way == "method":

        class Trainer:
            def __init__(self):
                self.network = model

            def step(self, a, b):
                return criterion(self.network(a), b)

        result = torch.compile(Trainer().step, backend=recorder)(x, y)
    elif way == "model.compile":
        root = Wrapped(model)
        root.compile(backend=recorder)
        result = criterion(root(x) / 2, y)
    else:
        root = Wrapped(Wrapped(model))
        result = criterion(torch.compile(root, backend=recorder)(x) / 4, y)
    torch.testing.assert_close(result, criterion(model.forward(x), y))
    assert recorder.graph.root_module is root
    prefix = {"nested wrapper": "inner.inner.", "model.compile": "inner."}.get(way, "")
    assert [item.fqn for item in recorder.graph.inputs if item.kind == "parameter"] == [
        f"{prefix}{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    ]
    assert all(item.kind == "batch" for item in recorder.graph.inputs if not isinstance(item, StateInput))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: dict[str, list[torch.Tensor]]
    nothing: None = None
    count: int = 0


def test_nested_outputs_and_arguments():
    linear = nn.Linear(3, 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, batch, *, scale, flag=True, unused=None):
            hidden = self.linear(batch["x"][0]) * scale
            if flag:
                hidden = hidden + 1
            return Output(
                loss=hidden.sum(), hidden={"h": [hidden, batch["x"][1]]}, count=batch["x"][0].shape[0]
            )

    x, z = torch.randn(4, 3), torch.randn(4)
    recorder, output = capture_call(Model(), {"x": [x, z]}, scale=2.0, unused=None)
    torch.testing.assert_close(output.hidden["h"][0], linear(x) * 2 + 1)
    torch.testing.assert_close(output.loss, (linear(x) * 2 + 1).sum())
    assert output.nothing is None and output.count == 4 and output.hidden["h"][1] is z
    assert recorder.graph.num_user_outputs == len(recorder.graph.graph_module.graph.output_node().args[0])


class Stops(nn.Module):
    """Stops gradients in each of the ways there are."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.teacher = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        a = self.first(x)
        with torch.no_grad():
            target = self.teacher(x).exp()
            target.add_(1)
            codes = self.second(a).tanh()
            with torch.enable_grad():
                inner = self.third(x)
        stopped = a.detach() * 2 + a.data
        straight_through = a + (a.round() - a).detach()
        frozen = self.probe(a)
        return (
            (a * target).sum()
            + (codes * a).sum()
            + (stopped * a).sum()
            + straight_through.square().sum()
            + frozen.sum()
            + inner.sum()
        )

    @torch.no_grad()
    def probe(self, a):
        return a.sin().view(-1)


def test_gradients_stop_where_the_model_stops_them():
    model = Stops().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    loss = model(x)
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    _, mine = capture_call(model, x)
    actual = torch.autograd.grad(mine, list(model.parameters()), allow_unused=True)
    assert relative_error(mine, loss) <= 1e-12
    for name, got, want in zip(names, actual, expected, strict=True):
        assert (got is None) == (want is None), name
        assert want is None or relative_error(got, want) <= 1e-12, name
    assert {name for name, want in zip(names, expected, strict=True) if want is None} >= {
        "teacher.weight",
        "second.weight",
    }


def test_a_detached_value_is_detached_once():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean() + (self.weight.detach() * self.bias).sum()

    captured, _ = capture_call(Model(3, 3), torch.randn(4, 3))
    targets = [node.target for node in captured.graph.graph_module.graph.nodes]
    assert targets.count(torch.ops.aten.detach.default) == 1


def test_checkpointed_parts_are_inlined():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(
                lambda y: self.second(y.tanh()).tanh(), self.first(x), use_reentrant=False
            ).sum()

    model, x = Model().double(), torch.randn(4, 3, dtype=torch.float64)
    recorder, loss = capture_call(model, x)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-12
    assert all(name.startswith("aten.") for name in ops(recorder))


def test_operations_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("table", torch.zeros(3))

        def forward(self, x):
            y = self.linear(x)
            y.sin_()
            y = y.relu().clone()
            y[:, 1:3] *= 2
            y[:, 0] = 1
            z = torch.zeros_like(y)
            z[y > 1] = 3
            z.index_add_(1, torch.tensor([0, 1]), y[:, :2])
            self.steps += 1
            self.table[1:] += 2
            return y, z + self.steps

    model, x = Model().double(), torch.randn(4, 4, dtype=torch.float64)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    y, z = compiled(x)
    assert recorder.graph.buffer_updates == ("steps", "table")
    assert model.steps == 1 and model.table.tolist() == [0, 2, 2]
    (y.sum() + z.square().sum()).backward()
    gradient = model.linear.weight.grad.clone()
    model.zero_grad()
    model.steps.zero_()
    again, other = model(x)
    (again.sum() + other.square().sum()).backward()
    assert relative_error(y, again) == 0 and relative_error(z, other) == 0
    assert relative_error(gradient, model.linear.weight.grad) <= 1e-12
    assert not any(name.split(".")[1].endswith("_") for name in ops(recorder) if name.startswith("aten."))


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_becomes_casts(where):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            if where == "around":
                return self.second(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.second(x)
            with torch.autocast("cpu", enabled=False):
                return x.exp()

    model, x = Model(), torch.randn(4, 3)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        result = compiled(x)
        expected = model(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    # The casts are part of the graph, whatever holds where it runs.
    torch.testing.assert_close(run(recorder.graph, recorder.arguments)[0], expected)
    addmm = torch.ops.aten.addmm.default
    linear = [
        node.meta["val"].dtype
        for node in recorder.graph.graph_module.graph.find_nodes(op="call_function", target=addmm)
    ]
    assert linear == ([torch.float32, torch.bfloat16] if where == "inside" else [torch.bfloat16] * 2)


def test_train_eval_and_no_grad_are_graphs_of_their_own_where_they_differ():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    x = torch.randn(4, 3)
    compiled(x)
    model.eval()
    torch.testing.assert_close(compiled(x), model[0](x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model[0](x))
    model.train()
    compiled(x)
    train, evaluation, no_grad = recorder.graphs
    assert train.fingerprint != evaluation.fingerprint == no_grad.fingerprint


def test_capture_draws_no_random_numbers_and_changes_nothing():
    model, inputs = build("conv", rows=4)
    model.model.insert(3, nn.Dropout(0.5))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = torch.get_rng_state()
    captured = []

    def backend(graph_module, example_inputs):
        compiled = recorder(graph_module, example_inputs)
        captured.append(torch.get_rng_state())
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        return compiled

    recorder = Recorder()
    marks = {key: dict(vars(value)) for key, value in inputs.items()}
    torch.compile(model, backend=backend)(**inputs)
    assert len(captured) == 1 and torch.equal(captured[0], before)
    assert {key: dict(vars(value)) for key, value in inputs.items()} == marks


def test_constants_made_in_the_model():
    def function(x):
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(4.0) + torch.tensor([5.0, 5.0, 5.0])

    x = torch.randn(4, 3)
    recorder, result = capture_call(function, x)
    assert torch.equal(result, function(x))
    assert len(recorder.graph.graph_module.graph.find_nodes(op="get_attr")) == 1


def test_matrices_are_inverted_without_checks():
    """From torch 2.13 on the checks are effects, which make_fx has no place for."""

    def function(x):
        squares = x[:, :, None] * x[:, None] + torch.eye(3, dtype=x.dtype)
        return (
            torch.linalg.inv(squares),
            torch.linalg.solve(squares, x[..., None]),
            torch.linalg.cholesky(squares),
        )

    x = torch.randn(5, 3, dtype=torch.float64)
    recorder, result = capture_call(function, x)
    assert "_linalg_check_errors" not in recorder.graph.graph_module.code
    for actual, expected in zip(result, function(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_batch_size_as_a_number():
    def function(x):
        return x.sum() / x.shape[0], x.new_zeros(x.size(0), 2).sum(1), x.shape[0]

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder)
    for rows in (4, 3, 1):
        x = torch.randn(rows, 3)
        mean, zeros, number = compiled(x)
        torch.testing.assert_close(mean, x.sum() / rows)
        assert zeros.shape == (rows,) and number == rows


def test_a_view_of_the_input_or_the_input_itself_as_output():
    x = torch.randn(4, 3)
    recorder, (same, view) = capture_call(lambda a: (a, a.view(-1)), x)
    assert torch.equal(same, x) and torch.equal(view, x.view(-1))


# The ranks of distributed tests, whose sets have other orders, agree on the fingerprints of all models.
@pytest.mark.parametrize("name", mostly(["rannc_basic", "hf_bert"], ["rannc_basic"]))
def test_fingerprint_does_not_depend_on_the_process(name):
    model, inputs = build(name, rows=4)
    recorder, _ = capture_call(model, **inputs)
    code = (
        "import torch\n"
        "from tests.unit.rannc_backend.capture.capture_harness import Recorder\n"
        "from tests.unit.rannc_backend.capture.capture_models import build\n"
        "unrelated = torch.compile(lambda x: x + x.shape[0], backend=Recorder())(torch.ones(2, 2))\n"
        f"model, inputs = build({name!r}, rows=7, seed=3)\n"
        "recorder = Recorder()\n"
        "torch.compile(model, backend=recorder)(**inputs)\n"
        "print(recorder.graph.fingerprint)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=True
    )
    assert other.stdout.split()[-1] == recorder.graph.fingerprint


def test_fingerprint_tells_models_apart():
    x = torch.randn(4, 3)
    models = {
        "linear": nn.Linear(3, 3),
        "no bias": nn.Linear(3, 3, bias=False),
        "wider": nn.Linear(3, 4),
        "double": nn.Linear(3, 3).double(),
        "renamed": nn.Sequential(nn.Linear(3, 3)),
        "dropout": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)),
        "more dropout": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)),
        "frozen": nn.Linear(3, 3).requires_grad_(False),
    }
    found = {}
    for name, model in models.items():
        torch._dynamo.reset()
        recorder, _ = capture_call(model, x.to(next(model.parameters()).dtype))
        found[name] = recorder.graph.fingerprint
    assert len(set(found.values())) == len(models)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["hf_bert", "conv", "hf_gpt2"])
def test_trace_for_another_device(name):
    """A model on the CPU, captured as if it were on the GPU that its stages will run on."""
    model, inputs = build(name, rows=3)
    recorder = Recorder(device=torch.device("cuda", 0))
    with pytest.raises(Exception, match="same device|cuda"):  # the graph needs its inputs there
        torch.compile(model, backend=recorder)(**inputs)
    graph = recorder.graph.graph_module.graph
    devices = {
        node.meta["val"].device.type for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    }
    # Counters of BatchNorm may stay where they are.
    assert "cuda" in devices and all(
        node.meta["val"].dim() == 0
        for node in graph.nodes
        if getattr(node.meta.get("val"), "device", None) == torch.device("cpu")
    )
    constants = [
        value for node in graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)
    ]
    assert all(device.type == "cuda" for device in constants)
