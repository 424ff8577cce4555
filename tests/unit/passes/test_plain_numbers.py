"""Values at the hint of the batch size; seen on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rannc_backend.passes.plain_numbers import at_hint, plain_mode, without_modes
from tests.unit.passes.batch.batch_tracing import trace


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).sin() * x.shape[0]


def test_values_are_those_of_the_hint_and_bind_nothing() -> None:
    graph = trace(Sizes(), dict(x=torch.randn(5, 3)))
    values = [node.meta["val"] for node in graph.graph_module.graph.nodes if "val" in node.meta]
    symbolic = next(value for value in values if isinstance(value, Tensor))
    rows = symbolic.shape[0].node.hint
    mode = plain_mode()
    plain = at_hint((symbolic, symbolic.shape[0], 2.5, [symbolic.t()]), mode)
    assert plain[0].fake_mode is mode and plain[0].shape == (rows, 3) and plain[0].stride() == (3, 1)
    assert plain[1:3] == (rows, 2.5) and plain[3][0].stride() == (1, 3) and not plain[0].requires_grad
    with mode:
        assert all(type(size) is int for size in (plain[0] @ plain[3][0]).shape)
    assert graph.rows_symbol not in graph.fake_mode.shape_env.replacements


def test_operators_run_as_they_are_without_modes() -> None:
    """Seen on torch 2.13."""
    with plain_mode(), without_modes():
        assert torch.zeros(2).tolist() == [0.0, 0.0]
