"""Hooks of modules: those of the first call are in the graph, and one that comes or goes later is seen, which Dynamo's
own settings leave out.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_after_the_first_call_counts_and_so_does_its_end(in_place: bool) -> None:
    torch._dynamo.reset()
    model, x = Net(), torch.randn(5, 4)
    call = model if in_place else torch.compile(model, backend="rannc", options={"stage_compiler": "eager"})
    if in_place:
        model.compile(backend="rannc", options={"stage_compiler": "eager"})
    plain = [model.last(model.first(x)), model.last(2 * model.first(x))]
    torch.testing.assert_close(call(x), plain[0])
    handle = model.first.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(call(x), plain[1])
    handle.remove()
    torch.testing.assert_close(call(x), plain[0])
    assert dynamo_config.skip_nnmodule_hook_guards, "Dynamo's setting is left changed"


def test_a_backward_hook_after_the_first_call_is_called() -> None:
    torch._dynamo.reset()
    model, x = Net(), torch.randn(5, 4)
    plain = copy.deepcopy(model)
    call = torch.compile(model, backend="rannc", options={"stage_compiler": "eager"})
    call(x).sum().backward()
    for each in (model, plain):
        each.zero_grad()
        each.last.register_full_backward_hook(lambda module, given, gotten: (2 * given[0],))
    call(x).sum().backward()
    plain(x).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
