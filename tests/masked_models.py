"""Forwards that write into detached tensors what has a gradient, as models with mask tokens do (MAE, SimMIM, BERT's masks by
hand): the detached tensor gets that gradient, and what it shares memory with the values alone.

In: nothing. Out: ways by name. Each takes rows `x`, a value `h` computed from them that has a gradient, and a `token` that is
learned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.changing_models import WIDTH

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def _mask(x: Tensor) -> Tensor:
    return x[:, 0] > 0


def _token_in_a_copy(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    masked = x.clone().detach()
    masked[_mask(x)] = token
    return masked + h


def _token_in_a_copy_of_a_value(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    masked = h.clone().detach()
    masked[_mask(x)] = token
    return masked * h


def _several_writes(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    masked = (2 * x).detach()
    masked[:, 0] = token[0]
    masked.mul_(token)
    masked += h * _mask(x)[:, None]
    return masked + h


def _both_are_read(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    """What it shares memory with has the values, without the gradient."""
    base = torch.zeros_like(h)
    seen = base.detach()
    seen[:, 0] = token[0]
    seen[:, 1] = h[:, 1]
    return base * h + seen


def _views_of_it(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    masked = x.clone().detach()
    masked[:, :2] = token[:2]
    return masked[:, :2].sum(1, keepdim=True) * h + masked.view(-1, WIDTH)


def _without_gradients(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    with torch.no_grad():
        masked = h.clone().detach()
        masked[_mask(x)] = token
    return masked * h


def _clamped(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    """No gradient comes, and the values of `h` stay as they are."""
    masked = (h * 1.0).detach()
    masked.clamp_(-0.3, 0.3)
    return masked * h * token


WRITTEN: dict[str, Way] = {
    "a copy": _token_in_a_copy,
    "a copy of a value": _token_in_a_copy_of_a_value,
    "several writes": _several_writes,
    "both are read": _both_are_read,
    "views": _views_of_it,
    "without gradients": _without_gradients,
    "clamped": _clamped,
}


def _read_in_the_other_place(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    base = h + 1.0
    masked = base.detach()
    masked[_mask(x)] = token
    return masked + base


def _view_from_before(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    masked = x.clone().detach()
    column = masked[:, 0]
    masked[:, :2] = token[:2]
    return h * column[:, None]


def _written_in_a_view(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    base = 2 * x
    masked = base.detach()
    masked[:, 0] = token[0]
    masked[:, 1].mul_(3.0)
    return base + h + masked


def _written_in_the_other_place(x: Tensor, h: Tensor, token: Tensor) -> Tensor:
    base = 2 * x
    masked = base.detach()
    masked[:, 0] = token[0]
    base.mul_(3.0)
    return h + masked


#: What no graph has: the code runs as written, or is refused with Dynamo.
WRITTEN_IN_BOTH: dict[str, Way] = {
    "read in the other place": _read_in_the_other_place,
    "a view from before": _view_from_before,
    "written in a view": _written_in_a_view,
    "written in the other place": _written_in_the_other_place,
}


class Masked(nn.Module):
    """A layer, one of the ways, and another layer."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.token = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(x, self.first(x).tanh(), self.token)).pow(2).mean()
