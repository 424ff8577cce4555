"""The collector is asked less while graphs are compiled, and is as the user has set it afterwards, however
that ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rannc_backend.errors import RanncError
from rannc_backend.settings.rare_collections import begin_rare_collections, rare_collections
from tests.unit.rannc_backend.capture.capture_harness import fresh_dynamo

OWN = (321, 7, 5)


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*OWN)
    with fresh_dynamo():
        yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("in_order", [True, False])
def test_stretches_end_in_any_order(in_order: bool) -> None:
    ends = [begin_rare_collections() for _ in range(3)]
    assert gc.get_threshold()[0] > 10_000 and gc.get_threshold()[1:] == OWN[1:]
    for end in ends if in_order else ends[::-1]:
        end()
    assert gc.get_threshold() == OWN


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0, 7, 5)
    with rare_collections():
        assert gc.get_threshold() == (0, 7, 5)


class Looks(nn.Module):
    """Notes how often the collector is asked while it is traced; adds up."""

    def __init__(self, seen: list[int], fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.fails = fails
        _SEEN[:] = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note()
        if self.fails:
            return self.layer(x)[torch.nonzero(x.sum(1) > 0)]
        return self.layer(x).sum()


_SEEN: list[int] = []


@torch._dynamo.assume_constant_result
def _note() -> int:
    _SEEN.append(gc.get_threshold()[0])
    return 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_compilation(fails: bool) -> None:
    model = torch.compile(Looks([], fails), backend="rannc")
    if fails:
        with pytest.raises(RanncError):
            model(torch.randn(4, 2))
    else:
        model(torch.randn(4, 2)).backward()
    gc.collect()
    assert _SEEN and min(_SEEN) > 10_000
    assert gc.get_threshold() == OWN
