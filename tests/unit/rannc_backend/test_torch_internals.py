"""The private torch functions of the runtime behave as they did on the versions named in their module (torch 2.13)."""

from __future__ import annotations

import torch

from rannc_backend.runtime.torch_internals import backward_keeps_graph, num_storage_users


def test_storage_users_are_counted_without_the_question() -> None:
    base = torch.empty(4)
    assert num_storage_users(base) == 1
    view = base[:2]
    assert num_storage_users(base) == 2
    alias = view.detach()
    del view
    assert num_storage_users(base) == 2
    del alias
    assert num_storage_users(base) == 1


def test_backward_knows_whether_its_graph_is_kept() -> None:
    seen: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(backward_keeps_graph())
            return grad

    y = Probe.apply(torch.zeros((), requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]
