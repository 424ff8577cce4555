"""Numbers of values that a forward gives back, keeps or checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.errors import ModelError
from tests.default_dtype import float64
from tests.nonstrict_models import Ends, Likelihood, batch
from tests.unit.rannc_backend.capture.nonstrict.test_captures import captured, results


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield


def test_losses_that_refuse_values_and_numbers_that_are_given_back() -> None:
    model, x = Likelihood(), batch(4)
    capture = captured(model, x)
    loss, numbers = results(capture, model, x)
    expected, same = model(x)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    assert numbers == pytest.approx(same, rel=1e-13)
    assert list(map(type, numbers.values())) == [float, int, float]
    assert not capture.recorded.decisions
    assert len(capture.recorded.unchecked) == 2, "torch._check, and the loss's own"
    places = capture.recorded.unchecked
    assert all("nonstrict_models.py" in place for place in places), places
    again, numbers = results(capture, model, batch(6, 3))
    torch.testing.assert_close(again, model(batch(6, 3))[0], rtol=1e-13, atol=1e-13)
    assert numbers["positive"] == int((batch(6, 3) > 0).sum())


class _Iterating(Ends):
    """Cannot run as written either, as it gives what is no tensor."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * len([row for row in x]), iter(())


class _Logging(Ends):
    def middle(self, x: Tensor) -> Tensor:
        self.logged = x.mean().item()
        return x * 2 if self.logged is None else x


class _Counted(Ends):
    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        return loss, loss.item() / x.shape[0]


class _Selecting(Ends):
    """A part that gets as many tokens as there are, and decides by their values."""

    class Part(nn.Module):
        def forward(self, chosen: Tensor) -> Tensor:
            return chosen * 2 if float(chosen.detach().sum()) > 0 else chosen

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def middle(self, x: Tensor) -> Tensor:
        return x[x > self.part(x[x > 0]).mean()]


@pytest.mark.parametrize(
    ("model", "reason", "cure"),
    [
        (_Iterating, "works for one batch size only", "x.size\\(0\\)"),
        (_Logging, "the forward changes the model.logged .a number", "value.detach\\(\\)"),
        (_Counted, "a number made of sizes", "give tensors"),
        (_Selecting, "known only when the model runs", "torch.where"),
    ],
)
def test_what_is_said_of_numbers(model: type[nn.Module], reason: str, cure: str) -> None:
    with pytest.raises(ModelError, match=reason) as found:
        captured(model(), batch(4))
    assert re.search(cure, found.value.cure)
