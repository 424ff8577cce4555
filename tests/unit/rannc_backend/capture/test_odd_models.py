"""Models of `tests.odd_models` train exactly in one process; over two stages:
tests/distributed/test_odd_models.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.nonstrict.meta_model import capture_model
from rannc_backend.errors import UserInputError
from tests.odd_models import (
    LENGTH,
    MODELS,
    WIDTH,
    ComplexOutputs,
    Conjugates,
    Windows,
    batch,
    worst_error,
)
from tests.unit.stage_models import capture


@pytest.mark.parametrize("name", MODELS)
def test_one_process(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().double()
    alone = copy.deepcopy(model)
    # Batch normalisation is exact with one micro-batch.
    num_micro_batches = 1 if name == "transposed_norm" else 2
    options = {"stage_compiler": "eager", "pipeline_num": num_micro_batches}
    loss = torch.compile(model, backend="rannc", options=options)(batch(4))
    loss.backward()
    expected = alone(batch(4))
    expected.backward()
    assert abs(float(loss - expected)) <= 1e-12 * abs(float(expected))
    assert worst_error(model, alone) <= 1e-12


def test_parts_of_a_complex_sum_are_outputs_with_gradients() -> None:
    torch.manual_seed(0)
    model = ComplexOutputs("numbers").double()
    alone = copy.deepcopy(model)
    for each in (
        alone,
        torch.compile(model, backend="rannc", options={"stage_compiler": "eager", "pipeline_num": 2}),
    ):
        loss, real, imaginary = each(batch(4))
        (loss + real * imaginary).backward()
    assert worst_error(model, alone) <= 1e-12


@pytest.mark.parametrize(("how", "words"), [("vector", "elements"), ("complex", "complex numbers")])
def test_gradients_of_several_numbers_are_refused_with_the_cure(how: str, words: str) -> None:
    compiled = torch.compile(
        ComplexOutputs(how).double(), backend="rannc", options={"stage_compiler": "eager"}
    )
    loss, other = compiled(batch(4))
    with pytest.raises(UserInputError, match=rf"output 1 of the compiled model.*{words}"):
        (loss + other.abs().square().sum()).backward()


def test_no_value_is_only_marked_as_a_conjugate() -> None:
    graph = capture_model(Conjugates().double(), [batch(4)], {}).graph_module.graph
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert any(value.is_complex() for value in values)
    assert not any(value.is_conj() or value.is_neg() for value in values)


def test_results_of_a_stage_are_contiguous_however_operators_lay_them_out() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    torch._dynamo.reset()
    model, x = Norm().double(), batch(6)
    rowwise = capture(model, lambda m, x: (m(x),), [x], ["rows"])
    (stage,) = rowwise.compile(rowwise.cut(1))
    values = {**rowwise.parameters, **rowwise.buffers, rowwise.batch_names[0]: x}
    outputs, saved = stage.forward([values[item.name] for item in stage.inputs])
    gradients = stage.backward(
        saved,
        [torch.ones(6, LENGTH, WIDTH, dtype=x.dtype) for _ in stage.grad_outputs],
        stage.scratch_gradients(),
    )
    assert all(value.is_contiguous() for value in (*outputs, *gradients))
    rows = next(value for value, output in zip(outputs, stage.outputs, strict=True) if output.kind == "rows")
    torch.testing.assert_close(rows, model(x), rtol=1e-12, atol=1e-12)


def test_windows_as_views_of_memory_are_selections() -> None:
    """A stage can differentiate those for every batch size, and follow rows through them."""
    graph = capture_model(Windows().double(), [batch(4)], {}).graph_module.graph
    targets = [node.target for node in graph.nodes]
    assert torch.ops.aten.as_strided.default not in targets
    assert targets.count(torch.ops.aten.index_select.default) == 2
