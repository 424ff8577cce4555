"""Lengths of inputs in one process: which sizes become symbolic, what is assumed of them, and that random numbers
are those of a graph for one length.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.first_trace import SeenSizes
from rannc_backend.passes.plain_numbers import length_hints
from rannc_backend.session_registry import REGISTRY
from tests.default_dtype import float64
from tests.length_models import MODELS, FlatTokens, LanguageModel, Recurrent, text_batch
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo, tensors_of


@pytest.fixture(autouse=True)
def _dynamo():
    with fresh_dynamo(begins=True), float64():
        yield


@pytest.mark.parametrize("name", ["flat_tokens", "branches", "segmenter"])
def test_the_graph_is_the_forward_for_every_size(name: str) -> None:
    entry, recorder = MODELS[name], Recorder()
    torch.manual_seed(0)
    model = entry.make()
    compiled = torch.compile(model, backend=recorder)
    for step, size in enumerate(entry.sizes[:5]):
        batch = entry.batch(3 + step, size, step)
        for found, expected in zip(tensors_of(compiled(**batch)), tensors_of(model(**batch)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # Dynamo traces the second of them again, where the first trace of a graph shows too little.
    assert len({graph.fingerprint for graph in recorder.graphs}) == entry.num_compilations
    lengths = recorder.graphs[-1].lengths
    assert lengths and all(length.hint not in (1, 16, 31, 64) for length in lengths)


@pytest.mark.parametrize("make", [LanguageModel, FlatTokens, Recurrent])
def test_random_numbers_are_those_of_a_graph_for_one_length(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    models = [make(0.4), make(0.4)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"plan_cache": False}
    symbolic = torch.compile(models[0], backend="rannc", options=options)
    static = torch.compile(models[1], backend="rannc", options=options, dynamic=False)
    for step, length in enumerate((9, 14, 23)):
        results = []
        for model in (symbolic, static):
            torch.manual_seed(step)
            loss, scores = model(**text_batch(3, length, step))
            loss.backward()
            results.append((loss.detach(), scores.detach()))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)
    assert [len(REGISTRY.sessions[model].runtimes) for model in models] == [2, 3]


class Unrolled(nn.Module):
    """Takes its input apart along a length: a graph of as many parts."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for part in x.unbind(1):
            state = torch.tanh(self.cell(part) + state)
        return state.sum(1)


class Splits(nn.Module):
    """An operator, not the model's code, wants a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        first, *_ = torch.tensor_split(x * self.gain, x.shape[1], 1)
        return first.sum((1, 2))


@pytest.mark.parametrize("make", [Unrolled, Splits])
def test_what_takes_a_length_for_a_number_is_compiled_for_each(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend="rannc", options={"plan_cache": False})
    for length in (3, 5, 4, 5):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    assert len(REGISTRY.sessions[model].runtimes) == 3


class Table(nn.Module):
    """No more positions than its table has; a shift by two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        return (x + self.table(torch.arange(rows)))[:, 2:].mean(1)


def test_conditions_are_those_of_the_compiled_frame() -> None:
    recorder = Recorder()
    model = Table()
    compiled = torch.compile(model, backend=recorder)
    for length in (9, 12, 30, 3, 39, 5):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    # 3 leaves one token behind the shift: a path of its own.
    assert len({graph.fingerprint for graph in recorder.graphs}) <= 3


def test_sizes_that_change_are_marked_from_then_on() -> None:
    seen, owner, other = SeenSizes(), nn.Module(), nn.Module()
    calls = [(4, 8), (5, 8), (4, 9), (4, 8), (4, 1)]
    marked = [seen.changed(owner, {"x": torch.zeros(*shape, 3)}) for shape in calls]
    assert marked == [{}, {}, {"x": frozenset({1})}, {"x": frozenset({1})}, {}]
    assert seen.changed(other, {"x": torch.zeros(4, 7, 3)}) == {}
    seen.give_up(lambda: owner)  # type: ignore[arg-type]
    assert seen.changed(owner, {"x": torch.zeros(4, 11, 3)}) == {}


def test_hints_are_numbers_of_no_size() -> None:
    first, second = length_hints((16, 24), {53, 16, 118})
    assert second == (16, 24) and len(set(first)) == 2
    assert not set(first) & {53, 16, 118, 59} and list(length_hints((), {3})) == []
