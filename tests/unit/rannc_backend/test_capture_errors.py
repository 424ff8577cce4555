"""Whatever Dynamo raises out of a compiled call is an error of this package, with the line that caused it; on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture_errors import own_error
from rannc_backend.errors import (
    DataDependentControlFlowError,
    GraphBreakError,
    RanncError,
    TraceError,
    UserInputError,
)

OPTIONS = {"stage_compiler": "eager"}


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
def test_refusals_are_errors_of_this_package(model: type[nn.Module], error: type[RanncError], fullgraph: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="rannc", options=OPTIONS, fullgraph=fullgraph)
    with pytest.raises(error) as caught:
        compiled(torch.randn(4, 3))
    text = str(caught.value)
    assert _line(model) in text and "What to change" in text, text
    assert "TORCHDYNAMO_VERBOSE" not in text and len(text.splitlines()) < 8, text


def test_the_operator_that_fails_is_named_without_dynamos_explanations() -> None:
    torch._dynamo.reset()
    with pytest.raises(TraceError, match=r"traced: linear: RuntimeError: a and b must have same [^\n]*3\]\.\n"):
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

    monkeypatch.setattr("rannc_backend.capture.trace_aten", fails)
    with pytest.raises(TraceError, match="AssertionError: an invariant of ours") as caught:
        torch.compile(nn.Linear(3, 3), backend="rannc", options=OPTIONS)(torch.randn(4, 3))
    assert caught.value.__cause__ is not None
