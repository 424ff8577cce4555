"""What replicas tell each other of the values that they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rannc_backend.runtime.gradients import new_values

Change = Callable[[torch.Tensor], torch.Tensor]


def _look(*tensors: torch.Tensor) -> list[float]:
    found = new_values.looked_at(tensors)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    ("change", "is_apart"),
    [
        (lambda value: value.clone(), False),
        (lambda value: value * (1 + torch.finfo(value.dtype).eps), False),  # rounded in another way
        (lambda value: value.flip(0), True),
        (lambda value: value * 1.5, True),
        (lambda value: torch.full_like(value, torch.nan), True),
    ],
    ids=["same", "rounded", "order", "larger", "nan"],
)
def test_replicas_are_apart_by_more_than_rounding(dtype: torch.dtype, change: Change, is_apart: bool) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, 700).to(dtype), torch.ones(5)
    others = [_look(first, second), _look(change(first), second)]
    assert new_values.apart([_look(first, second), *others]) == ([0] if is_apart else [])
    assert new_values.apart([_look(second, first), _look(second, change(first))]) == ([1] if is_apart else [])


def test_numbers_without_fractions_and_none_at_all() -> None:
    whole = torch.arange(9)
    assert new_values.apart([_look(whole), _look(whole.clone())]) == []
    assert new_values.apart([_look(whole), _look(whole + 1)]) == [0]
    assert new_values.apart([_look(torch.ones(0)), _look(torch.ones(0))]) == []
    assert new_values.looked_at([]) is None and new_values.apart([[], []]) == []
