"""Modules whose code decides by values run as written, as one operator of the graph of the others."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend import row_wise
from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import Call, call_of
from rannc_backend.capture.nonstrict.captures import Capture, capture_call
from rannc_backend.capture.nonstrict.kept_modules import WHOLE_MODEL
from rannc_backend.capture.nonstrict.kept_operators import NAMESPACE
from rannc_backend.capture.nonstrict.swapping import hide
from rannc_backend.errors import BatchMixedError, ModelError, UnsupportedModelError
from rannc_backend.passes.kept_functions import operator_code
from rannc_backend.passes.stage.liveness import live_bytes
from rannc_backend.planner.cost.compute import operator_cost
from rannc_backend.planner.cost.tensor_sizes import numel
from tests import kept_models, own_backward_models, row_number_models
from tests.default_dtype import float64
from tests.kept_models import (
    DECLARED,
    MODELS,
    REFUSED,
    CenteredExperts,
    Counted,
    HitExperts,
    Mixture,
    drawing,
    recounting,
)
from tests.nonstrict_models import WHOLE, WIDTH, Ends, batch, graph_arguments


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield


def captured(model: nn.Module) -> Capture:
    return capture_call(model, call_of(model, (batch(4),), {}))


def results(capture: Capture, model: nn.Module, x: Tensor) -> Tensor:
    call = call_of(model, (x,), {})
    graph = capture.recorded.captured
    outputs = graph.graph_module(*graph_arguments(capture, call))
    result = capture.recorded.result(outputs[: graph.num_user_outputs], call)
    assert isinstance(result, Tensor)
    return result


BACKWARDS = {name: (make, "Layer") for name, make in own_backward_models.MODELS.items()} | {
    "in the model itself": (own_backward_models.Whole, "Whole")
}


@pytest.mark.parametrize("name", [*MODELS, *BACKWARDS])
def test_the_graph_is_the_forward_for_every_batch(name: str) -> None:
    make, cls = (MODELS | BACKWARDS)[name]
    model = make()
    capture = captured(model)
    assert set(capture.recorded.kept_modules.values()) == {cls}
    for rows in (2, 4, 7, 31):
        alone = copy.deepcopy(model)
        result, expected = results(capture, model, batch(rows, rows)), alone(batch(rows, rows))
        model.zero_grad()
        result.backward()
        expected.backward()
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            zeros = torch.zeros_like(mine)
            torch.testing.assert_close(
                zeros if mine.grad is None else mine.grad,
                zeros if theirs.grad is None else theirs.grad,
                rtol=1e-12,
                atol=1e-13,
            )


@pytest.mark.parametrize("name", row_number_models.KEPT)
def test_code_that_uses_the_batch_size_as_a_number_runs_as_written(name: str) -> None:
    """The innermost module of that code, or all of the model where it is its own."""
    model = row_number_models.MODELS[name]()

    def call(rows: int) -> Call:
        return call_of(model, row_number_models.batch(rows, rows), {})

    capture = capture_call(model, call(4), all_rows=True)
    assert set(capture.recorded.kept_modules.values()) == {row_number_models.KEPT[name]}
    assert "one batch size only" in capture.recorded.why_kept
    for rows in (2, 4, 7):
        graph = capture.recorded.captured
        outputs = graph.graph_module(*graph_arguments(capture, call(rows)))
        result = capture.recorded.result(outputs[: graph.num_user_outputs], call(rows))
        expected = model(*row_number_models.batch(rows, rows))
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_whose_own_forward_asks_for_values_runs_as_written(name: str) -> None:
    model = WHOLE[name]()
    capture = captured(model)
    assert list(capture.recorded.kept_modules) == [WHOLE_MODEL]
    for rows in (2, 4, 7):
        model.zero_grad()
        result, alone = results(capture, model, batch(rows, rows)), copy.deepcopy(model)
        expected = alone(batch(rows, rows))
        result.backward()
        expected.backward()
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_a_module_is_an_operator_and_the_rest_of_the_graph_is_not() -> None:
    graph = captured(Mixture(HitExperts)).recorded.captured.graph_module.graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert sum(name.startswith(NAMESPACE) for name in names) == 2
    assert sum(name.startswith("aten.topk") for name in names) == 2


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_class_keeps_rows_apart(name: str) -> None:
    split = analyze(captured(DECLARED[name]()).recorded.captured, whole_batch="never").split
    assert split.whole_batch is None


def test_a_wrong_declaration_of_a_class_is_refused() -> None:
    with pytest.raises(
        BatchMixedError, match="for rows of the batch together than for the same rows in parts"
    ):
        analyze(captured(Mixture(CenteredExperts)).recorded.captured, whole_batch="never")


def test_a_class_that_is_not_declared_meets_and_says_how_not_to() -> None:
    """A subclass is another class, and has to be declared by itself."""

    class Derived(kept_models.DeclaredHitExperts):
        pass

    analysis = analyze(captured(Mixture(Derived)).recorded.captured)
    assert analysis.split.whole_batch is not None
    assert "rannc_backend.row_wise" in analysis.split.whole_batch.reason


def test_what_a_module_computes_and_keeps_is_counted() -> None:
    """Two products of 8 times WIDTH for each of a token's two choices; for its gradient all of it once more."""
    captured_graph = captured(Mixture(HitExperts)).recorded.captured
    analysis = analyze(captured_graph)
    node = next(node for node in analysis.split.rowwise.graph.nodes if "HitExperts" in str(node.target))
    (value,) = node.meta["val"]
    cost = operator_cost(node, analysis.needs_grad)
    assert cost.operator_class == "matmul"
    assert sympy.expand(cost.forward_flops - 2 * 2 * (2 * 8) * numel(value)) == 0
    assert cost.backward_flops == 3 * cost.forward_flops
    work = operator_code(node.target).work  # type: ignore[union-attr]
    # At least the chosen tokens and what lies between the products, in float64.
    assert work.num_bytes >= 2 * 8 * (1 + 8 / WIDTH)
    backward = getattr(torch.ops.rannc_module, f"{node.target._schema.name.split('::')[1]}_backward").default
    symbol, made = captured_graph.rows_symbol, []
    for target in (node.target, backward):
        graph = fx.Graph()
        tensors = [graph.placeholder(f"value_{place}") for place in range(2)]
        for each in tensors:
            each.meta["val"] = value
        behind = ([tensors[0]], tensors, [], [tensors[1]]) if target is backward else (tensors, [])
        made.append(graph.call_function(target, behind))
        made[-1].meta["val"] = [value]
        graph.output(made[-1])
        (peak,) = live_bytes(graph, ignored=[each.name for each in tensors], rows_symbol=symbol)
        # A forward is run with gradients too, which its code may ask for.
        wanted = math.ceil(work.num_bytes) * numel(value)
        assert sympy.expand(peak - wanted) == 0
    assert operator_cost(made[1], ()).forward_flops == 3 * cost.forward_flops


def test_equal_modules_of_two_models_are_two_operators() -> None:
    first, second = Mixture(HitExperts), Mixture(HitExperts)
    with torch.no_grad():
        second.experts[0].up.mul_(3)
    captures = captured(first), captured(second)
    for capture, model in zip(captures, (first, second), strict=True):
        torch.testing.assert_close(results(capture, model, batch(5)), model(batch(5)), rtol=1e-13, atol=0)


def test_a_model_is_not_kept_alive() -> None:
    model = Mixture(HitExperts)
    capture = captured(model)
    arguments = graph_arguments(capture, call_of(model, (batch(4),), {}))
    graph = capture.recorded.captured.graph_module
    del model, capture
    gc.collect()
    with pytest.raises(UnsupportedModelError, match="is gone"):
        graph(*arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_as_written_is_refused(name: str) -> None:
    model = REFUSED[name]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="known only when") as refused:
        captured(model)
    assert "kept_models.py" in refused.value.location
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_attributes_that_a_part_sets_are_its_own() -> None:
    """They are those of its last run, a capture leaves none behind, and they end no capture."""
    model = Counted()
    capture = captured(model)
    assert model.part.steps == 0
    for rows in (4, 7):
        alone = copy.deepcopy(model)
        assert capture.serves(call_of(model, (batch(rows, rows),), {})) == ""
        results(capture, model, 9 * batch(rows, rows))
        alone(9 * batch(rows, rows))
        assert model.part.steps == alone.part.steps > 0
        assert torch.equal(model.part.largest, alone.part.largest)


def test_what_other_code_reads_of_such_attributes_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="reads an attribute that is set by a module that runs"):
        captured(Counted(reads=True))


def test_ranks_that_do_not_run_a_part_have_no_attributes_of_it() -> None:
    model = Counted()
    give_back = hide(captured(model).recorded.kept_attributes)
    assert "set on the ranks" in repr(copy.deepcopy(model).part.steps)
    with pytest.raises(UnsupportedModelError, match="is set by a module that runs as written"):
        float(model.part.steps)
    give_back()
    assert model.part.steps == 0


def test_a_batch_size_as_a_number_that_cannot_run_as_written_is_told_with_its_line() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x.sum() * len(range(x.shape[0])), iter(())

    with pytest.raises(UnsupportedModelError, match="works for one batch size only") as found:
        captured(Counting())
    assert "in forward" in found.value.location


def test_what_gives_other_results_the_second_time_ends_the_step() -> None:
    model = recounting()
    result = results(captured(model), model, batch(4))
    with pytest.raises(UnsupportedModelError, match="other results the second time"):
        result.backward()


def test_both_runs_of_a_step_draw_the_same_and_each_step_anew() -> None:
    model = drawing()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    capture = captured(model)
    assert torch.equal(torch.get_rng_state(), state), "a capture draws no number of the user's generator"
    code = str(capture.recorded.captured.graph_module.code)
    assert code.count("torch.ops.aten.randint.") == 1
    gradients = []
    for _ in range(3):
        model.zero_grad()
        result = results(capture, model, batch(4))
        result.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert not torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[1], gradients[2])
    # Of a step: the loss changes as its gradient says.
    torch.manual_seed(5)
    model.zero_grad()
    before = results(capture, model, batch(4))
    before.backward()
    steps = [1e-6 * torch.linspace(-1, 1, each.numel()).view_as(each) for each in model.parameters()]
    expected = sum(
        float((each.grad * step).sum()) for each, step in zip(model.parameters(), steps, strict=True)
    )
    with torch.no_grad():
        for each, step in zip(model.parameters(), steps, strict=True):
            each.add_(step)
        torch.manual_seed(5)
        change = float(results(capture, model, batch(4)) - before)
    assert change == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("does", ["draws", "writes"])
def test_a_row_wise_class_neither_draws_nor_writes_buffers(does: str) -> None:
    model = drawing() if does == "draws" else kept_models.Normalized()
    cls = type(model.part if does == "draws" else model.normalizing)
    derived = row_wise(type("Derived", (cls,), {}))
    (model.part if does == "draws" else model.normalizing).__class__ = derived
    recorded = captured(model).recorded
    assert list(recorded.kept_modules) == [WHOLE_MODEL], "which is not declared"
    assert "draws random numbers or changes buffers, which a row-wise module may not" in recorded.why_kept


class _WritesArgument(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach()
        y += float(y.sum()) > 1e9
        return x * 2


class _HoldingWriter(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.part = _WritesArgument()

    def middle(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_where_a_part_writes_into_its_arguments_the_whole_model_runs_as_written() -> None:
    """The argument is its own there."""
    model = _HoldingWriter()
    capture = captured(model)
    assert list(capture.recorded.kept_modules) == [WHOLE_MODEL]
    assert "changes its inputs or trained parameters in place" in capture.recorded.why_kept
    torch.testing.assert_close(results(capture, model, batch(4)), model(batch(4)))


class _Growing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x]) if x.detach().max() > 100 else x + 1


class _Grown(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.part = _Growing()
        self.scale = nn.Parameter(torch.ones(()))

    def middle(self, x: Tensor) -> Tensor:
        return self.part(x * self.scale)


def test_results_of_other_sizes_than_in_the_capture_end_the_step() -> None:
    model = _Grown()
    capture = captured(model)
    torch.testing.assert_close(results(capture, model, batch(4)), model(batch(4)))
    with torch.no_grad():
        model.scale.fill_(1e4)
    with pytest.raises(UnsupportedModelError, match="results of other sizes"):
        results(capture, model, batch(4))


class _Gated(nn.Module):
    """Zeros, which have no gradient, on one of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.detach().abs().max() > 2 else torch.zeros_like(x)


class _HoldingGated(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.part = _Gated()

    def middle(self, x: Tensor) -> Tensor:
        return x + self.part(3 * x)


@pytest.mark.parametrize("size", [0.01, 10.0])
def test_a_result_has_its_gradient_on_the_path_that_has_one(size: float) -> None:
    """Whatever path the capture took."""
    model = _HoldingGated()
    alone = copy.deepcopy(model)
    capture = captured(model)
    with torch.no_grad():
        model.first.bias.mul_(0), alone.first.bias.mul_(0)
    results(capture, model, size * batch(4)).backward()
    alone(size * batch(4)).backward()
    assert (alone.part.inner.weight.grad is None) == (size < 1)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-13)


class _LookingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_gradients_are_those_of_the_module_where_a_mode_looks_on() -> None:
    """As the meter of a step does: operators below it record none by themselves."""
    model = Mixture(HitExperts)
    alone = copy.deepcopy(model)
    capture = captured(model)
    with _LookingOn():
        results(capture, model, batch(6)).backward()
    alone(batch(6)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)
