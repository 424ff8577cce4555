"""Whatever Dynamo raises out of a compiled call is an error of this package, with the line that caused it; on
torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from rannc_backend.capture.errors import own_error, own_errors_only
from rannc_backend.errors import (
    DataDependentControlFlowError,
    GraphBreakError,
    InternalError,
    NoBatchDimensionError,
    RanncError,
    TraceError,
    UserInputError,
)

OPTIONS = {"stage_compiler": "eager", "capture": "dynamo", "whole_batch": "never"}


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class ShapesDoNotFit(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + torch.ones(2, 7)  # here


class Breaks(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()  # here
        return x * 2


class Branches(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:  # here
            x = x * 2
        return x


class Raises(_Body):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 3:
            raise KeyError("not this width")
        return self.linear(x)


class Inner(_Body):
    def forward(self, x: Tensor) -> Tensor:
        return _helper(self.linear(x))


def _helper(x: Tensor) -> Tensor:
    return x.view(5, -1)[:, :7] @ torch.ones(11)  # here


def _line(model: type[nn.Module]) -> str:
    code = (_helper if model is Inner else model.forward).__code__
    lines = Path(__file__).read_text().split("\n")
    number = next(n for n in range(code.co_firstlineno, len(lines)) if lines[n].endswith("# here")) + 1
    return f"{Path(__file__).name}:{number}"


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("model", "error"),
    [
        (ShapesDoNotFit, TraceError),
        (Breaks, GraphBreakError),
        (Branches, DataDependentControlFlowError),
        (Inner, RanncError),
    ],
)
def test_refusals_are_errors_of_this_package(
    model: type[nn.Module], error: type[RanncError], fullgraph: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="rannc", options=OPTIONS, fullgraph=fullgraph)
    with pytest.raises(error) as caught:
        compiled(torch.randn(4, 3))
    text = str(caught.value)
    assert _line(model) in text and "What to change" in text, text
    assert "TORCHDYNAMO_VERBOSE" not in text and len(text.splitlines()) < 8, text


def test_the_operator_that_fails_is_named_without_dynamos_explanations() -> None:
    torch._dynamo.reset()
    with pytest.raises(
        TraceError, match=r"traced: linear: RuntimeError: a and b must have same [^\n]*3\]\.\n"
    ):
        torch.compile(nn.Linear(3, 3), backend="rannc", options=OPTIONS)(torch.randn(4, 7))


def test_what_the_model_raises_is_its_own() -> None:
    torch._dynamo.reset()
    with pytest.raises((KeyError, GraphBreakError), match="not this width"):
        torch.compile(Raises(), backend="rannc", options=OPTIONS)(torch.randn(4, 3))


def test_wrong_options_are_told_without_dynamos_words() -> None:
    torch._dynamo.reset()
    with pytest.raises(UserInputError, match="unknown option") as caught:
        torch.compile(nn.Linear(3, 3), backend="rannc", options={"nonsense": 1})(torch.randn(4, 3))
    assert caught.value.__cause__ is None


def test_other_errors_are_none_of_dynamos() -> None:
    for error in (RuntimeError("x"), ValueError("y"), UserInputError("z")):
        assert own_error(error) is None


def test_a_failure_within_the_backend_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an invariant of ours")

    monkeypatch.setattr("rannc_backend.capture.graph.trace_aten", fails)
    with pytest.raises(TraceError, match="AssertionError: an invariant of ours") as caught:
        torch.compile(nn.Linear(3, 3), backend="rannc", options=OPTIONS)(torch.randn(4, 3))
    assert caught.value.__cause__ is not None


class Nested(nn.Module):
    """What is odd is three functions down, some of them the library's own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), _Calls(function))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Tensor) -> Tensor:
        return (
            torch.utils.checkpoint.checkpoint(self.function, y, use_reentrant=False)
            if self.training
            else self.function(y)
        )


def _prints(y: Tensor) -> Tensor:
    print(y.shape)  # noqa: T201
    return y * 2


def _logs(y: Tensor) -> Tensor:
    logging.getLogger("x").info("y")
    return y * 2


def _branches(y: Tensor) -> Tensor:
    return y * 2 if y.sum() > 0 else y


def _tests_its_size(y: Tensor) -> Tensor:
    return y * 2 if y.shape[0] > 3 else y


def _fixes_its_size(y: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in y.unbind(0)])


def _mixes(y: Tensor) -> Tensor:
    return y.flip(0)


def _sorts_of_the_batch(y: Tensor) -> Tensor:
    return y[y.sum(-1) > 0]


def _has_another_derivative(y: Tensor) -> Tensor:
    return _Square.apply(y)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        _prints,
        _logs,
        _branches,
        _tests_its_size,
        _fixes_its_size,
        _mixes,
        _sorts_of_the_batch,
        _has_another_derivative,
        _helper,
    ],
)
def test_the_innermost_line_is_named(function: Callable[[Tensor], Tensor], evaluated: bool) -> None:
    torch._dynamo.reset()
    model = Nested(function)
    compiled = torch.compile(model.eval() if evaluated else model, backend="rannc", options=OPTIONS)
    with pytest.raises(RanncError) as caught:
        compiled(torch.randn(4, 3))
    error, first = caught.value, function.__code__.co_firstlineno
    file, _, line = error.location.partition(", ")[0].rpartition(":")
    assert file == __file__ and first <= int(line) <= first + 2, str(error)
    assert f"in {function.__name__}" in error.location


def test_of_inputs_the_line_of_the_call_is_named() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(3, 3), backend="rannc", options=OPTIONS)
    with pytest.raises(RanncError, match=f"{Path(__file__).name}:[0-9]+, in test_of_inputs"):
        compiled(torch.randn(3))


def _fails_in_itself(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("a table of ours")


@pytest.mark.parametrize(
    ("place", "is_about_a_node"),
    [
        ("rannc_backend.passes.canonicalize.inline", True),
        ("rannc_backend.capture.analysis.outputs_by_value", False),
        ("rannc_backend.session.cut_by_plan", False),
        ("rannc_backend.stages.joint_graph.split_joint", False),
        ("rannc_backend.deployment.lower_lanes", False),
    ],
)
def test_an_error_of_ours_is_told_as_such(
    place: str, is_about_a_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.fft.fft(self.linear(x)).clone()
            z[:, :2] = 0  # here
            return z.abs().sum()

    torch._dynamo.reset()
    # As a function of the package: what raises decides whose error it is.
    function = FunctionType(
        _fails_in_itself.__code__, {**_fails_in_itself.__globals__, "__name__": "rannc_backend.anywhere"}
    )
    monkeypatch.setattr(place, function)
    with pytest.raises(
        InternalError, match=r"an error in rannc_backend itself: KeyError: 'a table of ours'"
    ) as caught:
        torch.compile(Writes(), backend="rannc", options=OPTIONS)(torch.randn(4, 3)).backward()
    text = str(caught.value)
    assert "report" in text and (
        _line(Writes) in text if is_about_a_node else f"{Path(__file__).name}:" in text
    ), text
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_lack_of_memory_keeps_its_class() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("cuda")):
        with pytest.raises(type(error)), own_errors_only():
            raise error


def test_a_place_keeps_the_error() -> None:
    with pytest.raises(NoBatchDimensionError) as caught, own_errors_only():
        raise NoBatchDimensionError({"x": [3]}) from KeyError("k")
    assert isinstance(caught.value.__cause__, KeyError) and "x: [3]" in caught.value.problem
    assert caught.value.location in str(caught.value) and Path(__file__).name in caught.value.location


class _FixedByTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.l1_loss(x, self.bias)  # here


def test_of_a_line_of_torch_the_users_is_named() -> None:
    torch._dynamo.reset()
    with pytest.raises(RanncError) as caught:
        torch.compile(_FixedByTorch(), backend="rannc", options=OPTIONS)(torch.randn(4, 3))
    assert _line(_FixedByTorch) in caught.value.location, str(caught.value)
