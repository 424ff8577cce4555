"""Stages compiled with Inductor: same numbers for any number of rows, one compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.stages.compiled_stage import CompileCache, CompiledStage
from tests.unit.stage_models import Rowwise, capture, relative_error, run_pipeline


class _Small(nn.Module):
    """Row-wise attention-like mixing, a merged batch, and a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.leave = nn.Linear(8, 6)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:  # [rows, 4, 6]
        value = torch.tanh(self.enter(x))
        scores = torch.softmax(value @ value.transpose(1, 2), dim=-1)
        return self.leave(self.norm(scores @ value)) + x


def _function(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    result = model(x)
    return result, (result * result).sum()


@pytest.fixture(scope="module")
def compiled() -> tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache]:
    torch.manual_seed(0)
    model = _Small().double()
    rowwise = capture(model, _function, [torch.randn(6, 4, 6, dtype=torch.float64)], ["rows", "partial"])
    cache = CompileCache()
    return model, rowwise, rowwise.compile(rowwise.cut(2), "inductor", cache=cache), cache


@pytest.fixture(scope="module")
def split(compiled: tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache]) -> list[CompiledStage]:
    """The same stages, whose backwards have two parts."""
    rowwise = compiled[1]
    return rowwise.compile(rowwise.cut(2), "inductor", splits_backward=True)


@pytest.mark.parametrize("in_two_parts", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (7,), (3, 3, 1, 1)])
def test_inductor_stages_equal_the_uncut_model(
    compiled: tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache],
    split: list[CompiledStage],
    sizes: tuple[int, ...],
    in_two_parts: bool,
) -> None:
    model, rowwise, stages, _ = compiled
    stages = split if in_two_parts else stages
    torch.manual_seed(1)
    x = torch.randn(sum(sizes), 4, 6, dtype=torch.float64)
    grad = torch.randn_like(x)
    rows_name, partial_name = (output.name for output in rowwise.outputs)
    seed = torch.tensor(0.5, dtype=torch.float64)
    actual = run_pipeline(rowwise, stages, [x], sizes, {rows_name: grad}, {partial_name: seed})
    leaf = x.clone().requires_grad_()
    result, partial = _function(model, leaf)
    ((result * grad).sum() + 0.5 * partial).backward()
    assert relative_error(actual.rows[rows_name], result.detach()) <= 1e-12
    assert relative_error(actual.partials[partial_name], partial.detach()) <= 1e-12
    assert relative_error(actual.input_gradients[rowwise.batch_names[0]], leaf.grad) <= 1e-12
    with_gradient = {name for name, value in rowwise.parameters.items() if value.grad is not None}
    assert set(actual.parameter_gradients) == with_gradient
    for name in with_gradient:
        assert relative_error(actual.parameter_gradients[name], rowwise.parameters[name].grad) <= 1e-12
    model.zero_grad()


def test_inductor_inference_and_saved_values(
    compiled: tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache],
) -> None:
    model, rowwise, stages, cache = compiled
    values = dict(rowwise.parameters)
    (name,) = rowwise.batch_names
    for rows in (1, 5):
        values[name] = torch.randn(rows, 4, 6, dtype=torch.float64)
        for stage in stages:
            args = [values[source.name] for source in stage.inputs]
            outputs, saved = stage.forward(args)
            storages = {
                v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
                for v in saved
                if isinstance(v, Tensor)
            }
            for source, arg in zip(stage.inputs, args, strict=True):
                if source.kind == "parameter":
                    storages.pop(arg.untyped_storage().data_ptr(), None)
            assert stage.saved_bytes.subs(rowwise.rows_symbol, rows) == sum(storages.values())
            for inferred, output, target in zip(stage.infer(args), outputs, stage.outputs, strict=True):
                assert relative_error(inferred, output) <= 1e-12
                values[target.name] = output
    again = rowwise.compile(rowwise.cut(2), "inductor", cache=cache)
    assert cache.num_hits == 2
    assert again[0]._variants is stages[0]._variants


def test_saved_values_survive_a_backward(
    compiled: tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache],
) -> None:
    _, rowwise, _, cache = compiled
    (stage, _) = rowwise.compile(rowwise.cut(2), "inductor", cache=cache)
    values = {**rowwise.parameters, rowwise.batch_names[0]: torch.randn(3, 4, 6, dtype=torch.float64)}
    outputs, saved = stage.forward([values[source.name] for source in stage.inputs])
    grads = [torch.randn_like(outputs[position]) for position in stage.grad_outputs]
    sinks = [stage.scratch_gradients() for _ in range(2)]
    for sink in sinks:
        stage.backward(saved, grads, sink)
    runs = [sink.gradients for sink in sinks]
    assert set(runs[0]) == set(stage.grad_parameters)
    assert all(torch.equal(runs[0][position], runs[1][position]) for position in runs[0])


def test_inductor_takes_strided_inputs_and_gradients(
    compiled: tuple[nn.Module, Rowwise, list[CompiledStage], CompileCache],
) -> None:
    _, rowwise, _, cache = compiled
    (stage, _) = rowwise.compile(rowwise.cut(2), "inductor", cache=cache)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    results = []
    for strided in (False, True):
        values = {**rowwise.parameters, rowwise.batch_names[0]: x.mT.contiguous().mT if strided else x}
        outputs, saved = stage.forward([values[source.name] for source in stage.inputs])
        ones = [
            torch.ones((), dtype=torch.float32).expand(outputs[position].shape)
            for position in stage.grad_outputs
        ]
        grads = ones if strided else [grad.double().contiguous() for grad in ones]
        results.append((outputs, stage.backward(saved, grads, stage.scratch_gradients())))
    for plain, other in zip(results[0], results[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


EXACT = 1e-12


class Pair(nn.Module):
    """Two values cross the cut; the linear layer before them and after them is used in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        left, right = hidden.sin(), hidden.cos()
        return self.outer(left * right + left).exp() + right


def test_values_and_gradients_are_stored_in_messages() -> None:
    torch.manual_seed(0)
    model = Pair().double()
    x = torch.randn(6, 6, dtype=torch.float64)
    rowwise = capture(model, lambda m, v: (m(v),), [x], ["rows"])
    places = [rowwise.staged_names.index("cos") + 1]
    crossing = frozenset({"sin", "cos"})
    first, second = rowwise.compile(
        rowwise.cut(2, places), "inductor", stored=crossing, stored_gradients=crossing
    )
    assert [first.outputs[position].name for position in first.stored_outputs] == ["sin", "cos"]
    assert {second.inputs[position].name for position in second.stored_gradients} == crossing
    leaf = x[:5].clone().requires_grad_()
    expected = model(leaf)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    for given in (True, False):
        message = torch.full((2, 5, 6), torch.nan, dtype=torch.float64)
        values = {**rowwise.parameters, rowwise.batch_names[0]: x[:5]}
        destinations = (
            {position: message[i] for i, position in enumerate(first.stored_outputs)} if given else {}
        )
        outputs, saved = first.forward([values[source.name] for source in first.inputs], destinations)
        values |= {slot.name: output for slot, output in zip(first.outputs, outputs, strict=True)}
        (result,), saved_behind = second.forward([values[source.name] for source in second.inputs])
        assert relative_error(result, expected.detach()) <= EXACT
        sent_back = torch.full((2, 5, 6), torch.nan, dtype=torch.float64)
        places_back = (
            {position: sent_back[i] for i, position in enumerate(second.stored_gradients)} if given else {}
        )
        returned = second.backward(saved_behind, [grad], second.scratch_gradients(), places_back)
        by_name = {
            second.inputs[p].name: gradient for p, gradient in zip(second.grad_inputs, returned, strict=True)
        }
        sink = first.scratch_gradients()
        (of_input,) = first.backward(
            saved, [by_name[first.outputs[p].name] for p in first.grad_outputs], sink
        )
        assert relative_error(of_input, leaf.grad) <= EXACT
        weight = next(
            p for p in first.grad_parameters if rowwise.parameters[first.inputs[p].name] is model.inner.weight
        )
        assert relative_error(sink.gradients[weight], model.inner.weight.grad) <= EXACT
        assert first.how_gradients_are_written[weight] == ("product",) and first.gradient_copies.launches == 0
        if given:
            assert not message.isnan().any() and not sent_back.isnan().any()
            assert outputs[first.stored_outputs[0]].data_ptr() == message.data_ptr()


class _Gate(nn.Module):
    """The gradient of `x` is what the gradient of the weight is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 8, dtype=torch.float64))

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return torch.tanh(x + a @ self.weight)


def test_a_message_that_is_used_again_leaves_what_is_kept_alone() -> None:
    model = _Gate()
    x, a = torch.rand(6, 8, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    rowwise = capture(
        model, lambda model, x, a: (model(x, a), model(x, a).sum()), [x, a], ["rows", "partial"]
    )
    name = rowwise.batch_names[0]
    (stage,) = rowwise.compile(
        rowwise.cut(1), "inductor", splits_backward=True, stored_gradients=frozenset({name})
    )
    given = {**rowwise.parameters, **dict(zip(rowwise.batch_names, (x, a), strict=True))}
    outputs, saved = stage.forward([given[item.name] for item in stage.inputs])
    grads = [torch.rand_like(outputs[position]) for position in stage.grad_outputs]
    message = torch.empty_like(x)
    position = next(place for place, item in enumerate(stage.inputs) if item.name == name)
    returned, kept = stage.backward_inputs(list(saved), grads, {position: message})
    through = dict(zip(stage.grad_inputs, returned, strict=True))[position].clone()
    assert torch.equal(message, through)
    message.fill_(float("nan"))
    sink = stage.scratch_gradients()
    stage.backward_weights(kept, sink)
    (gradient,) = sink.gradients.values()
    assert relative_error(gradient, a.t() @ through) <= 1e-12
