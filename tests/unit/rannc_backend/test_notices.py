"""Exceptions of the contract are said once for a model, only where they apply; see also
tests/distributed/test_notices.py for the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rannc_backend.notices import EXCEPTIONS


class Norm(nn.Module):
    """Batch normalisation, as a module or as a function without running statistics: no name tells."""

    def __init__(self, *, functional_form: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = None if functional_form else nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (
            (functional.batch_norm(y, None, None, training=True) if self.norm is None else self.norm(y))
            .square()
            .mean()
        )


class Loss(nn.Module):
    """A layer, perhaps one more, and a loss."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), *more)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


STATISTICS, RANDOM, NARROW = (
    "statistics of each slice",
    "not the numbers that plain torch draws",
    "in that type",
)
CASES: dict[str, tuple[Callable[[], nn.Module], int, list[str]]] = {
    "module": (lambda: Norm(functional_form=False), 2, [STATISTICS]),
    "function": (lambda: Norm(functional_form=True), 2, [STATISTICS]),
    "whole_batch": (lambda: Norm(functional_form=False), 1, []),
    "evaluated": (lambda: Norm(functional_form=False).eval(), 2, []),
    "dropout": (lambda: Loss(nn.Dropout(0.5)), 1, [RANDOM]),
    "no_dropout": (lambda: Loss(nn.Dropout(0.0)), 2, []),
    "bfloat16": (lambda: Loss().to(torch.bfloat16), 2, [NARROW]),
    "bfloat16_at_once": (lambda: Loss().to(torch.bfloat16), 1, []),
    "frozen_bfloat16": (lambda: Loss(nn.Linear(4, 4).bfloat16().requires_grad_(False)), 2, []),
    "several": (lambda: Loss(nn.Dropout(0.5), nn.BatchNorm1d(4)), 2, [STATISTICS, RANDOM]),
    "nothing": (Loss, 2, []),
    "outside_alone": (lambda: nn.Linear(4, 4), 2, []),
}


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rannc_backend.notices"]


@pytest.mark.parametrize("case", CASES)
def test_what_applies_is_said_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, num_micro_batches, expected = CASES[case]
    torch._dynamo.reset()
    logging.getLogger("rannc_backend").setLevel(logging.INFO)
    model = make()
    dtype = next(model.parameters()).dtype
    if case == "frozen_bfloat16":
        model.layers.insert(1, _Cast(torch.bfloat16))  # type: ignore[union-attr, operator]
    compiled = torch.compile(
        model, backend="rannc", options={"stage_compiler": "eager", "pipeline_num": num_micro_batches}
    )
    with caplog.at_level(logging.INFO, logger="rannc_backend"):
        for rows in (4, 6, 4):
            compiled(torch.randn(rows, 4, dtype=dtype)).sum().backward()
        # Another graph of the model, to which the same applies.
        with torch.autocast("cpu", torch.bfloat16):
            compiled(torch.randn(4, 4, dtype=dtype)).sum().backward()
    lines = _lines(caplog)
    assert len(lines) == len(expected) and all(
        words in line for words, line in zip(expected, lines, strict=True)
    ), lines


def test_each_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, logger="rannc_backend"):
        for _ in range(2):
            torch.compile(Loss(nn.Dropout(0.5)), backend="rannc", options={"stage_compiler": "eager"})(
                torch.randn(4, 4)
            )
    assert len(_lines(caplog)) == 2


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[..., None]).square().sum()


@pytest.mark.parametrize("capture", ["auto", "nonstrict"])
@pytest.mark.parametrize("announced", [False, True])
def test_lengths_that_nobody_announced_are_told_of(
    announced: bool, capture: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_Sum(), backend="rannc", options={"stage_compiler": "eager", "capture": capture})
    with caplog.at_level(logging.INFO, logger="rannc_backend"):
        for length in (5, 9, 7):
            x = torch.randn(4, length)
            if announced:
                torch._dynamo.mark_dynamic(x, 1, min=2, max=64)
            compiled(x)
    lines = _lines(caplog)
    assert len(lines) == (not announced) and all(
        "mark_dynamic(tensor, dim, max=longest)" in line for line in lines
    )


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_every_exception_is_in_the_contract(kind: str, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "semantics.md").read_text()
    assert f"| {kind} |" in text.partition("## 7.")[2].partition("## 8.")[0]


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
