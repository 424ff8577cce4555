"""What is counted of an optimizer whose parameters are a compiled model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rannc_backend.runtime.gradients.optimizer_watch import OptimizerWatch
from rannc_backend.runtime.step_counts import StepCounts, key_of


def _watched(parameter: torch.Tensor) -> tuple[OptimizerWatch, StepCounts]:
    counts = StepCounts()
    table: Any = SimpleNamespace(
        number=0,
        name_of=lambda other: "weight" if other is parameter else None,
        key_of=lambda other: key_of(0, "weight"),
        require_reduced_gradients=lambda what: None,
        lacks=lambda other: False,
        take_plain_gradients=list,
        updates={},
    )
    world: Any = SimpleNamespace(counts=counts, of_own_rows=WeakKeyDictionary(), size=1)
    return OptimizerWatch(world, lambda: [table], lambda parameter: False, lambda: False), counts


def test_each_step_and_each_clearing_counts_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    watch, counts = _watched(parameter)
    optimizer = torch.optim.SGD([parameter], 0.1)
    for _ in range(2):
        watch._before_clear(optimizer)
    for _ in range(3):
        parameter.grad = torch.ones(2)
        watch._before_step(optimizer, (), {})
    found = counts.of_parameters((key_of(0, "weight"),))
    assert (found.num_clears, found.num_updates) == (2, 3)


def test_an_optimizer_of_other_parameters_counts_nothing() -> None:
    watch, counts = _watched(torch.nn.Parameter(torch.ones(2)))
    watch._before_clear(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
    assert not counts.optimizers
