"""What the user gets back beside tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.default_dtype import float64


class _Sizes(nn.Linear):
    """Gives its batch size, as loops want that weigh losses by it, and what is made of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, int, torch.Size, int]:
        return super().forward(x).pow(2).mean(), x.shape[0], x.shape, 2 * x.shape[0] * x.shape[1]


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
def test_batch_sizes_are_those_of_the_whole_batch(capture: str) -> None:
    with float64():
        torch._dynamo.reset()
        model = _Sizes(6, 3)
        options = {"stage_compiler": "eager", "capture": capture}
        compiled = torch.compile(model, backend="rannc", options=options)
        for rows in (5, 8):
            loss, size, shape, product = compiled(torch.randn(rows, 6))
            loss.backward()
            assert (size, tuple(shape), product) == (rows, (rows, 6), 12 * rows)
