"""Recurrent layers as one operator: values and gradients of torch's own, for every length, and rows that stay rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.errors import ModelError
from rannc_backend.passes.batch.layouts import Rows, Several
from rannc_backend.passes.recurrent import LAYERS, call_recurrent, is_packed, recurrent_mode
from tests.default_dtype import float64

WIDTH, STATE = 4, 6
LAYERS_OF: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm both ways": (nn.LSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    "lstm projected": (nn.LSTM, {"proj_size": 3}),
    "gru": (nn.GRU, {"num_layers": 2}),
    "gru without biases": (nn.GRU, {"bias": False, "batch_first": True}),
    "tanh": (nn.RNN, {"batch_first": True}),
    "relu both ways": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


class _Whole(TorchFunctionMode):
    """Recurrent functions go by way of the operator."""

    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if mode := recurrent_mode(func):
            assert not is_packed(args)
            self.num_calls += 1
            return call_recurrent(mode, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _loss(result: tuple[Tensor, Any]) -> Tensor:
    output, states = result
    states = states if isinstance(states, tuple) else (states,)
    return output.pow(2).sum() + sum(state.sin().sum() for state in states)


@pytest.mark.parametrize("name", LAYERS_OF)
def test_values_and_gradients_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    make, settings = LAYERS_OF[name]
    layer = make(WIDTH, STATE, **settings).double()
    x = torch.randn(5, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    watch = _Whole()
    rows = x.shape[0] if layer.batch_first else x.shape[1]
    count = layer.num_layers * (1 + layer.bidirectional)
    widths = [layer.proj_size or STATE, STATE][: 1 + (make is nn.LSTM)]
    states = [torch.randn(count, rows, width, dtype=torch.float64, requires_grad=True) for width in widths]
    given = tuple(states) if make is nn.LSTM else states[0]
    losses = [_loss(layer(x, given))]
    with watch:
        losses.append(_loss(layer(x, given)))
    leaves = [x, *states, *layer.parameters()]
    found, expected = (torch.autograd.grad(loss, leaves) for loss in reversed(losses))
    assert watch.num_calls == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-13, atol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_dropout_between_layers_is_an_operator_of_its_own() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(WIDTH, STATE, num_layers=3, dropout=1.0, bidirectional=True).double()
    x = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    with _Whole():
        output, states = layer(x)
    expected, expected_states = layer(x)
    # All that is handed on is dropped, so that no numbers are drawn that could differ.
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(states, expected_states, rtol=1e-13, atol=0)


class _Tagger(nn.Module):
    def __init__(self, batch_first: bool, rows_as_tokens: bool = False) -> None:
        super().__init__()
        self.batch_first, self.rows_as_tokens = batch_first, rows_as_tokens
        self.layer = nn.LSTM(WIDTH, STATE, batch_first=batch_first, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        swapped = self.batch_first == self.rows_as_tokens
        output, (last, _) = self.layer(x.transpose(0, 1) if swapped else x)
        return output.pow(2).mean() + last.sum()


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_node_for_every_length(batch_first: bool) -> None:
    torch.manual_seed(0)
    with float64():
        model = _Tagger(batch_first)
        call = call_of(model, (torch.randn(3, 7, WIDTH),), {})
        captured = capture_call(model, call, changing={(0, 1)}).recorded.captured
        analysis = analyze(captured)
    (node,) = captured.graph_module.graph.find_nodes(op="call_function", target=LAYERS)
    assert len(captured.lengths) == 1 and captured.length_conditions == ()
    rows = 0 if batch_first else 1
    assert analysis.split.whole_batch is None
    assert analysis.split.layouts[node.name] == Several((Rows(rows), Rows(1), Rows(1)))


def test_rows_in_place_of_tokens_are_refused() -> None:
    with float64():
        model = _Tagger(batch_first=True, rows_as_tokens=True)
        call = call_of(model, (torch.randn(3, 7, WIDTH),), {})
        captured = capture_call(model, call).recorded.captured
        with pytest.raises(ModelError, match="goes from row to row"):
            analyze(captured, whole_batch="never")
        assert analyze(captured).split.whole_batch is not None


def test_under_autocast_torchs_own_is_unrolled() -> None:
    class Half(_Tagger):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = Half(batch_first=True)
    call = call_of(model, (torch.randn(3, 4, WIDTH),), {})
    graph = capture_call(model, call).recorded.captured.graph_module.graph
    assert not graph.find_nodes(op="call_function", target=LAYERS)


class _Looking(TorchDispatchMode):
    """As what counts a step's memory does: it sees every operator, below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_gradients_under_a_mode_that_looks_on() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(WIDTH, STATE).double()
    x, states = torch.randn(5, 3, WIDTH).double(), [torch.zeros(1, 3, STATE).double() for _ in range(2)]
    arguments = ("lstm", x, states, list(layer.parameters()), None, True, 1, False, False)
    backward = torch.ops.rannc_recurrent.layers_backward.default
    grads = [torch.ones_like(each) for each in LAYERS(*arguments)]
    with torch.no_grad():
        expected = backward(grads, *arguments)
        with _Looking():
            found = backward(grads, *arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert any(bool(each.any()) for each in found)
