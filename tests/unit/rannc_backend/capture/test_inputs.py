"""Capture: which inputs are batches, also where sizes agree by chance or a batch has one row, and what else
may change between calls.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.capture.inputs import plain_numbers
from tests.choice import mostly
from tests.unit.rannc_backend.capture.capture_harness import Recorder, capture_call, fresh_dynamo, kinds

LENGTH = 6


@pytest.fixture(autouse=True, params=[True, False], ids=["begun", "again"])
def begins(request):
    """Whether the first trace has a symbolic batch size from its start, as for the backend, or a second one
    is asked for.
    """
    with fresh_dynamo(begins=request.param):
        torch.manual_seed(0)
        yield request.param


def test_changed_numbers_give_another_graph_not_a_symbol():
    class Model(nn.Module):
        def forward(self, x, scale, power):
            return x * scale + power

    recorder = Recorder()
    compiled = torch.compile(Model(), backend=recorder)
    x = torch.randn(3, 2)
    for scale, power in ((2.0, 1), (3.0, 1), (3.0, 4), (4.0, 5)):
        torch.testing.assert_close(compiled(x, scale, power), x * scale + power)
    assert len({graph.fingerprint for graph in recorder.graphs}) == 4
    # Another sequence length is another graph, too: of all lengths, where the trace knows in time that it changes.
    long = torch.randn(3, 7)
    torch.testing.assert_close(compiled(long, 2.0, 1), long * 2 + 1)
    captured = recorder.graphs[-1]
    sizes = {node.name: node.meta["val"] for node in captured.graph_module.graph.find_nodes(op="placeholder")}
    assert captured.lengths or sizes["x_x"].shape[1] == 7
    for length in captured.lengths:
        assert (length.carrier, length.dim) == ("x_x", 1) and length.hint not in (2, 3, 7)


@pytest.mark.parametrize("rows", mostly([4, LENGTH, 1], [LENGTH, 1]))
def test_inputs_without_a_batch_dimension(rows):
    """Also when the local batch is as large as the mask by chance."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.table = torch.randn(LENGTH, 3)

        def forward(self, x, mask, positions, temperature, labels):
            x = self.linear(x) + self.table + positions
            scores = (x @ x.transpose(1, 2)).masked_fill(mask == 0, -9.0) / temperature
            return F.cross_entropy(scores.softmax(-1).sum(1), labels)

    x, labels = torch.randn(rows, LENGTH, 3), torch.randint(0, LENGTH, (rows,))
    mask, positions = torch.ones(LENGTH, LENGTH).tril(), torch.randn(1, LENGTH, 3)
    model = Model()
    recorder, result = capture_call(model, x, mask, positions, torch.tensor(2.0), labels)
    torch.testing.assert_close(result, model(x, mask, positions, torch.tensor(2.0), labels))
    found = {
        name.removeprefix("x_").removeprefix("c_"): kind
        for name, kind in kinds(recorder).items()
        if "linear" not in name
    }
    assert found.pop("self_table") == "replicated"
    # Of tensors of size 1 nothing says which are batches: in a batch of 1 the positions are one, with the
    # same result.
    assert found == {
        "x": "batch", "labels": "batch", "mask": "replicated", "temperature": "replicated",
        "positions": "batch" if rows == 1 else "replicated",
    }  # fmt: skip


def test_rows_of_all_batch_inputs_must_agree():
    compiled = torch.compile(lambda x, y: x - y, backend=(recorder := Recorder()))
    compiled(torch.randn(4, 3), torch.randn(4, 3))
    compiled(torch.randn(5, 3), torch.randn(5, 3))
    with pytest.raises(RuntimeError):
        compiled(torch.randn(4, 3), torch.randn(5, 3))
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("first", mostly([4, LENGTH, 1], [LENGTH, 1]))
def test_sizes_that_mix_batch_inputs(first):
    """As models do that take the batch size from one input to reshape another; a mask of [T, T] is none of
    them.
    """

    def function(x, padding, causal):
        rows = x.shape[0]
        padding = padding.view(rows, -1)
        if (missing := LENGTH - padding.shape[-1]) > 0:
            padding = F.pad(padding, (0, missing))
        for _ in range(padding.shape[0] // rows):
            x = x + torch.arange(padding.shape[1])
        if 2 * rows > 3 * padding.shape[0]:
            x = x * 2
        return ((x + padding)[:, :, None] + causal).sum((1, 2))

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder)
    for rows in (first, 3, 1):
        arguments = torch.randn(rows, LENGTH), torch.randn(rows, LENGTH), torch.ones(LENGTH, LENGTH).tril()
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert kinds(recorder) == {"x_x": "batch", "x_padding": "batch", "x_causal": "replicated"}
    fingerprint = recorder.graph.fingerprint
    torch._dynamo.reset()
    other, _ = capture_call(
        function, torch.randn(5, LENGTH), torch.randn(5, LENGTH), torch.ones(LENGTH, LENGTH)
    )
    assert other.graph.fingerprint == fingerprint


def test_batch_inputs_that_only_their_size_ties_must_agree_later():
    recorder = Recorder()
    compiled = torch.compile(lambda x, y: (x.exp(), y.exp()), backend=recorder)
    compiled(torch.randn(4, 3), torch.randn(4, 3))
    compiled(torch.randn(1, 3), torch.randn(1, 3))
    with pytest.raises(RuntimeError, match="several sizes"):
        compiled(torch.randn(4, 3), torch.randn(5, 3))
    assert len(recorder.graphs) == 1


def _tokens_of_two_kinds(x, text_ids, image_ids):
    """As transformers of diffusers do: the places of tokens have no batch dimension."""
    places = torch.cat((text_ids, image_ids)).to(x.dtype)
    return x * places.sum(-1, keepdim=True)


@pytest.mark.parametrize("first", [4, 2, 3])  # 2, 3: as many as there are tokens of a kind
def test_the_batch_size_is_the_one_that_may_change_alone(first):
    recorder = Recorder()
    compiled = torch.compile(_tokens_of_two_kinds, backend=recorder)
    ids = torch.ones(2, 3), torch.ones(3, 3)
    for rows in (first, 7, 5):
        x = torch.randn(rows, 5, 4)
        torch.testing.assert_close(compiled(x, *ids), _tokens_of_two_kinds(x, *ids))
    assert kinds(recorder) == {"x_x": "batch", "x_text_ids": "replicated", "x_image_ids": "replicated"}
    assert len(recorder.graphs) == 1
    with pytest.raises(RuntimeError, match="several sizes"):
        torch.compile(lambda x, y: x.exp().sum() + y.exp().sum(), backend=recorder)(
            torch.randn(4, 3), torch.randn(5, 3)
        )


def test_tests_for_a_batch_of_one_take_the_general_way():
    """As transformers do before they expand; micro-batches of one row run the same graph as all others."""

    def function(x, bias):
        if x.shape[0] != bias.shape[0]:
            bias = bias.expand(x.shape[0], -1)
        if len(x) > 1 and x.size(0) != 0:
            bias = bias * 2
        return x + bias

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder)
    bias = torch.randn(1, 3)
    for rows in (4, 1, 2):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x, bias), x + bias * 2)
    assert len(recorder.graphs) == 1


def test_the_same_tensor_twice_is_one_input():
    x = torch.randn(4, 3)
    recorder, _ = capture_call(lambda a, b: (a * b).sum(), x, x)
    assert [item.kind for item in recorder.graph.inputs] == ["batch"]


def test_inputs_that_require_grad():
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    recorder, result = capture_call(lambda a, b: (a.exp() * b).sum(), x, y)
    assert [item.requires_grad for item in recorder.graph.inputs] == [True, False]
    result.backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * y)


def test_slices_of_a_larger_tensor_go_into_checkpointed_layers():
    """A checkpointed layer gets the place of the slice in its memory as an argument."""
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    x = torch.randn(8, 3)
    graphs = []
    for part in (x[4:], x[:4], x[2:7]):
        torch._dynamo.reset()
        recorder = Recorder()
        result = torch.compile(Model(), backend=recorder)(part)
        torch.testing.assert_close(result, layers[1](layers[0](part)))
        graphs.append(recorder.graph.fingerprint)
    assert len(set(graphs)) == 1


def test_numbers_by_their_names() -> None:
    class Inner(nn.Module):
        factor, kept = 2.0, "text"

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.number, self.flag = 0.5, 3, True

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, weight: float, flag: bool = False, *, step: int = 0) -> Tensor:
            return x * weight * step

    found = {"inner.scale": 0.5, "inner.number": 3}
    x = torch.ones(2)
    assert plain_numbers(Outer(), (x, 0.1), {"step": 4}) == {**found, "weight": 0.1, "step": 4}
    assert plain_numbers(Outer(), (x, 0.1, True, 1.5), {"rate": 2}) == {
        **found,
        "argument 1": 0.1,
        "argument 3": 1.5,
        "rate": 2,
    }
