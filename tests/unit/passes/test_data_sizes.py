"""Values whose sizes depend on data are counted at a bound, and computed as they are."""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.passes.data_sizes import bound_data_sizes, has_data_sizes, log_sigmoid_backward
from tests.data_size_models import MODELS, batch
from tests.default_dtype import float64
from tests.nonstrict_models import graph_arguments


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_forward_whatever_the_sizes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    capture = capture_call(model, call_of(model, batch(5, 0), {}))
    graph = capture.recorded.captured.graph_module
    for rows, seed in ((5, 0), (3, 1), (8, 2)):
        call = call_of(model, batch(rows, seed), {})
        alone = copy.deepcopy(model)
        found, expected = graph(*graph_arguments(capture, call))[0], alone(*batch(rows, seed))
        model.zero_grad()
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_a_derivative_that_asks_for_no_size_is_that_of_torch() -> None:
    value = torch.linspace(-800, 800, 33, dtype=torch.float64)
    (gradient,) = torch.ones_like(value)[None].cos()
    _, buffer = torch.ops.aten.log_sigmoid_forward(value)
    expected = torch.ops.aten.log_sigmoid_backward(gradient, value, buffer)
    torch.testing.assert_close(log_sigmoid_backward(gradient, value, buffer), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_such_a_graph_has_bounds_and_runs_on_the_whole_batch_if_its_rows_meet(name: str) -> None:
    model = MODELS[name]()
    captured = capture_call(model, call_of(model, batch(5, 0), {})).recorded.captured
    assert any(has_data_sizes(node.meta.get("val")) for node in captured.graph_module.graph.nodes)
    analysis = analyze(captured)
    # Masks of rows choose of each row; what `where` finds is not followed.
    assert (analysis.split.whole_batch is not None) == (name == "experts")
    values = [node.meta.get("val") for node in analysis.split.rowwise.graph.nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    assert not any(has_data_sizes(value) for value in tensors)


def test_a_selection_is_counted_as_all_elements_that_it_looks_at() -> None:
    model: nn.Module = MODELS["selected"]()
    captured = capture_call(model, call_of(model, batch(5, 0), {})).recorded.captured
    graph_module = captured.graph_module
    names = bound_data_sizes(graph_module)
    sizes = {node.name: node.meta["val"].shape for node in graph_module.graph.nodes if node.name in names}
    expressions = {
        sympy.sympify(shape[0].node.expr) for shape in sizes.values() if isinstance(shape, torch.Size)
    }
    assert 6 * captured.rows_symbol in expressions, expressions


def test_where_choices_are_not_followed_lengths_stay() -> None:
    """Rows that would be apart if they were followed are no reason to capture without lengths."""
    model = MODELS["selected"]()
    call = call_of(model, batch(5, 0), {})
    captured = capture_call(model, call, changing=frozenset({(0, 1), (1, 1)})).recorded.captured
    assert captured.lengths
    assert analyze(captured).split.whole_batch is None
    split = analyze(captured, choices=False).split
    assert split.whole_batch is not None and not split.has_choices


class _Margin(nn.Module):
    """A margin for the score of the right class, chosen by a mask (ArcFace): as many scores as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.last(x)
        mask = torch.zeros(labels.size(0), 4, dtype=scores.dtype)
        mask[torch.arange(labels.size(0)), labels] = 1
        right = scores[mask == 1]
        return F.cross_entropy(scores + mask * (right.cos() - right).unsqueeze(1), labels)


def test_as_many_elements_as_samples_that_a_mask_chooses() -> None:
    with float64():
        torch._dynamo.reset()
        model = _Margin()
        alone = copy.deepcopy(model)
        compiled = torch.compile(model, backend="rannc", options={"stage_compiler": "eager"})
        for rows in (5, 7):
            x, labels = torch.randn(rows, 6), torch.randint(4, (rows,))
            losses = [each(x, labels) for each in (compiled, alone)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(*losses, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(model.last.weight.grad, alone.last.weight.grad, rtol=1e-12, atol=1e-13)
