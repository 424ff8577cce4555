"""Which optimizers of a process have parameters of a model."""

from __future__ import annotations

import torch
from torch import nn

from rannc_backend.runtime.gradients.optimizer_probe import optimizers_of


class Wrapped(torch.optim.SGD):
    """A class of the user's own."""


def test_optimizers_are_found_by_their_parameters() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = torch.optim.AdamW(model.parameters()), Wrapped([model.bias], lr=0.1)
    strange = torch.optim.SGD(other.parameters(), lr=0.1)
    assert {id(each) for each in optimizers_of(list(model.parameters()))} == {id(first), id(second)}
    assert optimizers_of(list(other.parameters())) == [strange]
    assert optimizers_of([nn.Parameter(torch.zeros(1))]) == []
