"""The mark of a tensor that is kept: nothing outside of a graph, an operator of torch.library in one."""

from __future__ import annotations

import pytest
import torch

import rannc_backend
from rannc_backend.kernels.checkpoint_mark import MARK, checkpoint_tensor

LAYOUTS = [
    torch.arange(12.0).view(3, 4),
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(3.0).view(3, 1).expand(3, 4),
    torch.arange(24.0).view(3, 8)[:, ::2],
]


def test_nothing_happens_outside_of_a_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert rannc_backend.checkpoint_tensor(x) is x


@pytest.mark.parametrize("x", LAYOUTS)
def test_the_operator_gives_an_equal_tensor_of_the_same_strides_and_memory_of_its_own(
    x: torch.Tensor,
) -> None:
    result = MARK(x)
    assert torch.equal(result, x) and result.stride() == x.stride()
    assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    torch.library.opcheck(MARK, (x.clone().requires_grad_(),))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_run_models_with_marks(backend: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_tensor(x.sin()).cos().sum()

    x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    forward(x).backward()
    expected, x.grad = x.grad, None
    torch.compile(forward, backend=backend)(x).backward()
    assert x.grad is not None and expected is not None
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=0)
