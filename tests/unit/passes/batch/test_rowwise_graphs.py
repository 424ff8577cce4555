"""Graphs put together at random from row-wise operators, views of the batch dimension and losses: slices
against the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.passes.batch.batch_tracing import trace
from tests.unit.passes.batch.slice_runner import Faults, split_traced, worst_error

WIDTH = 6
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]

#: each takes x [rows, 4, 6], an earlier value of that shape, and a weight [6, 6], and gives that shape
BODY: dict[str, Operator] = {
    "linear": lambda x, e, w: x @ w,
    "tanh": lambda x, e, w: torch.tanh(x),
    "add_earlier": lambda x, e, w: x + e,
    "gate": lambda x, e, w: x * torch.sigmoid(e),
    "softmax": lambda x, e, w: x.softmax(-1),
    "norm": lambda x, e, w: F.layer_norm(x, (WIDTH,), w[0]),
    "time_major": lambda x, e, w: (x.transpose(0, 1) @ w).transpose(0, 1),
    "flat": lambda x, e, w: (x.reshape(-1, WIDTH) @ w).view(x.shape),
    "flat_time_major": lambda x, e, w: (
        torch.tanh(x.transpose(0, 1).reshape(-1, WIDTH) @ w).view(4, -1, WIDTH).transpose(0, 1)
    ),
    "columns": lambda x, e, w: (
        x.permute(2, 1, 0).reshape(WIDTH * 4, -1).cos().view(WIDTH, 4, -1).permute(2, 1, 0)
    ),
    "attend": lambda x, e, w: F.scaled_dot_product_attention(x[:, None], e[:, None], x[:, None])[:, 0],
    "blocks": lambda x, e, w: torch.cat([x, e]).sin().chunk(2)[0],
    "interleave": lambda x, e, w: torch.stack([x, e], 1).flatten(0, 1).sin().view(-1, 2, 4, WIDTH)[:, 1],
    "shift": lambda x, e, w: torch.cat([x[:, 1:], e[:, :1]], 1),
    "pool": lambda x, e, w: x - x.mean(1, keepdim=True),
    "token": lambda x, e, w: torch.cat([w[:1].expand(x.shape[0], -1, -1), x], 1)[:, :-1],
    "over_batch_size": lambda x, e, w: x * 3 / x.shape[0] + e,
    "numbered": lambda x, e, w: x + x[torch.arange(x.shape[0]), (e[:, :, 0] > 0).long().sum(1) % 4][:, None],
}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda x, m, w: x.pow(2).mean(),
    "masked": lambda x, m, w: (x.sum((1, 2)) * m).sum() / m.sum().clamp(min=1),
    "cross_entropy": lambda x, m, w: F.cross_entropy(
        x.flatten(0, 1), (m.long()[:, None].expand(-1, 4) * 101 - 100).flatten()
    ),
    "penalty": lambda x, m, w: 0.1 * w.pow(2).sum(),
    "mean_product": lambda x, m, w: (x.mean((0, 1)) * x.sin().mean((0, 1))).sum(),
    "root": lambda x, m, w: x.norm(),
    "balanced": lambda x, m, w: (x.sum(-1) * (m / m.mean().clamp(min=0.1))[:, None]).mean(),
}


class Random(nn.Module):
    def __init__(self, body: list[str], losses: list[str], back: int) -> None:
        super().__init__()
        self.body, self.losses, self.back = body, losses, back
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3 for _ in body)

    def forward(self, x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        values = [x @ self.weights[0]]
        for name, weight in zip(self.body, self.weights):
            values.append(BODY[name](values[-1], values[-min(self.back, len(values))], weight))
        total = sum(LOSSES[name](values[-1], m, self.weights[0]) for name in self.losses)
        return total, values[-1], values[len(values) // 2].transpose(0, 1)


@settings(max_examples=15, deadline=None)
@given(
    body=st.lists(st.sampled_from(sorted(BODY)), min_size=1, max_size=6),
    losses=st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=3),
    back=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_random_graphs_are_the_same_in_slices(
    body: list[str], losses: list[str], back: int, sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    rows = sum(sizes)
    mask = (torch.arange(rows) % 3 != 1).double()
    graph = trace(
        Random(body, losses, back), dict(x=torch.randn(rows, 4, WIDTH, dtype=torch.float64), m=mask)
    )
    split = split_traced(graph)
    assert worst_error(graph, split, sizes) <= 1e-11
    assert worst_error(graph, split, sizes, Faults(drop_slice=0)) > 1e-9
