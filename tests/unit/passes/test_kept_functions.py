"""Functions with a backward of their own as operators: values, gradients, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend.ir.reach import OperatorCalls
from rannc_backend.passes.batch.batch_axis import analyze_batch_axis
from rannc_backend.passes.batch.layouts import Rows, Several
from rannc_backend.passes.kept_functions import (
    Autocast,
    CannotKeep,
    backward_code,
    call_kept,
    kept_function,
    noting_calls,
    operator_code,
)
from rannc_backend.passes.pipeline import PassError
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.choosing_code import doubling


class Weighted(torch.autograd.Function):
    """A backward that is not the derivative, a number, and an input whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float, other: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight * scale, x

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return 7 * first @ weight.t() + second, x.t() @ first, None, None


class Centering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Drawing(Tripled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Changing(Tripled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Reading(Tripled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Counting(Tripled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.clone(), 3


def _kept(cls: type[torch.autograd.Function], *args: Any) -> Any:
    return call_kept(cls, cls.apply, args)


def _arguments() -> list[Any]:
    torch.manual_seed(0)
    x, weight, other = torch.randn(5, 3), torch.randn(3, 3), torch.randn(5)
    return [
        x.double().requires_grad_(),
        weight.double().requires_grad_(),
        0.5,
        other.double().requires_grad_(),
    ]


def test_values_and_gradients_are_those_of_the_function() -> None:
    found, expected = [], []
    for results, apply in ((found, lambda *args: _kept(Weighted, *args)), (expected, Weighted.apply)):
        x, weight, scale, other = _arguments()
        first, second = apply(x, weight, scale, other)
        ((first * first).sum() + second.sin().sum()).backward()
        assert other.grad is None
        results += [first.detach(), second.detach(), x.grad, weight.grad]
    for one, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(one, alone, rtol=0, atol=0)


def test_an_operator_and_that_of_its_gradient_have_one_code() -> None:
    seen: list[Any] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight, scale, other = _arguments()
    with Seeing():
        first, second = _kept(Weighted, x, weight, scale, other)
        (first.sum() + second.sum()).backward()
    forwards = [operator_code(each) for each in seen if operator_code(each) is not None]
    backwards = [backward_code(each) for each in seen if backward_code(each) is not None]
    assert len(forwards) == len(backwards) == 1 and forwards[0] is backwards[0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        value = 2 * x
        return value, value.view(-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second.view_as(first)


def test_outputs_have_memory_of_their_own() -> None:
    """Neither that of an input nor that of another output: an operator of torch.library may not share."""
    x = torch.randn(4, 3, requires_grad=True)
    for values in (_kept(Twice, x), _kept(Weighted, x, torch.eye(3).requires_grad_(), 1.0, x)):
        places = {tensor.untyped_storage().data_ptr() for tensor in (x, *values)}
        assert len(places) == 3


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 7 * gradient.float() @ weight.t(), x.t() @ gradient.float()


def test_it_runs_as_the_call_did_under_autocast() -> None:
    found = []
    for apply in (lambda *args: _kept(Product, *args), Product.apply):
        x, weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.eye(3) + 0.1
        x.requires_grad_(), weight.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = apply(x, weight)
        assert first.dtype == torch.bfloat16
        first.float().sum().backward()
        found.append((first.detach(), x.grad, weight.grad))
    for one, alone in zip(*found, strict=True):
        torch.testing.assert_close(one, alone)


def test_one_name_for_one_call_and_another_for_another() -> None:
    def name(scale: float, *, gradient: bool = True) -> str:
        x, weight, _, other = _arguments()
        seen: list[str] = []

        class Seen(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if kept_function(func) is not None:
                    seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Seen():
            _kept(Weighted, x, weight.requires_grad_(gradient), scale, other)
        return seen[0]

    assert name(0.5) == name(0.5) and len({name(0.5), name(0.25), name(0.5, gradient=False)}) == 3


@pytest.mark.parametrize(
    ("cls", "more", "reason"),
    [
        (Drawing, (), "draws random numbers"),
        (Changing, (), "changes its inputs in place"),
        (Reading, (), "does not run without values"),
        (Counting, (), "gives what is no tensor"),
        (Tripled, ([torch.nn.ReLU()],), "argument of list"),
    ],
)
def test_what_no_operator_can_be(cls: Any, more: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(CannotKeep, match=reason):
        _kept(cls, torch.randn(3, requires_grad=True), *more)


class _Model(torch.nn.Module):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls
        self.first, self.weight = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        # The trace has no gradients; functions are kept where there are.
        hidden, weight = self.first(x).requires_grad_(), self.weight.requires_grad_()
        if issubclass(self.cls, Weighted):
            first, second = _kept(self.cls, hidden, weight, 0.5, x.sum(1))
            return (first + second).sum(1)
        return _kept(self.cls, hidden).sum(1)


def _traced(cls: Any) -> Traced:
    return trace(_Model(cls), {"x": torch.randn(5, 3)})


@pytest.mark.parametrize("cls", [Tripled, Weighted])
def test_a_function_on_rows_is_followed(cls: Any) -> None:
    traced = _traced(cls)
    layouts = analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)
    (name,) = [node.name for node in traced.graph_module.graph.nodes if kept_function(node.target)]
    layout = layouts[name]
    assert isinstance(layout, Several) and set(layout.elements) == {Rows(0)}


class Constant(Weighted):
    """The gradient of what has no rows is no sum over rows: several slices would give a multiple of it."""

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return second, torch.ones_like(ctx.saved_tensors[1]), None, None


@pytest.mark.parametrize("cls", [Centering, Constant])
def test_a_backward_that_mixes_rows_is_refused(cls: Any) -> None:
    traced = _traced(cls)
    with pytest.raises(PassError, match="mixes rows"):
        analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)


class Swapping(Tripled):
    """Changes memory of its own, by way of a view, in which rows meet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        columns = x.clone().t()
        columns[:, 1:].add_(columns[:, :1])
        return columns.t()


class Shifting(Tripled):
    """Changes memory of its own, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        columns = x.clone().t()
        columns[1:].add_(columns[:1])
        return columns.t()


class Filling(Tripled):
    """Writes its result into memory that has nothing of a row before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = torch.zeros(x.shape)
        found[:, 1:] = 2 * x[:, 1:]
        return found


def test_writes_that_mix_rows_are_refused() -> None:
    traced = _traced(Swapping)
    with pytest.raises(PassError, match="mixes rows"):
        analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)


@pytest.mark.parametrize("cls", [Shifting, Filling])
def test_writes_are_followed(cls: Any) -> None:
    traced = _traced(cls)
    layouts = analyze_batch_axis(traced.graph_module, traced.batch, traced.rows_symbol)
    (name,) = [node.name for node in traced.graph_module.graph.nodes if kept_function(node.target)]
    assert layouts[name] == Several((Rows(0),))


def _scaling(factor: float) -> Any:
    class Scaling(Tripled):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return factor * x

    return Scaling


def test_classes_of_one_name_are_other_operators() -> None:
    """Users make them in functions, with numbers that their code reads."""
    x = torch.randn(3, requires_grad=True)
    for factor in (2.0, 5.0):
        torch.testing.assert_close(_kept(_scaling(factor), x), factor * x)


def test_autocast_is_kept_as_the_call_ran_under_it() -> None:
    assert Autocast.now("cpu").setting is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Autocast.now("cpu")
    assert found.setting == ("cpu", torch.bfloat16) and not torch.is_autocast_enabled("cpu")
    with found.again():
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
def test_code_as_written_is_asked_for_results_that_are_differentiated(asked: tuple[int, ...]) -> None:
    name = "rannc_tests_choosing.doubling.default"
    calls = OperatorCalls(absent=frozenset((name, place) for place in (0, 1) if place not in asked))
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    with noting_calls(calls):
        results = doubling(tensors, [])
        sum(results[place].sum() for place in asked).backward()
    assert calls.reached == {name: set(asked)}, "and only what has come is noted"
    for place, factor in enumerate((2.0, 3.0)):
        expected = factor if place in asked else 0.0
        assert tensors[place].grad.tolist() == [expected] * (place + 2)
