"""Mixtures of experts whose tokens are sorted by expert, in the ways that libraries write them: each sample is
computed from itself alone, in an order that depends on all of them.

In: nothing. Out: `MODELS` by way of writing. Each takes rows `x` of [rows, LENGTH, WIDTH] and gives its loss and a
value per token, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, HIDDEN, NUM_EXPERTS, NUM_CHOICES = 3, 6, 8, 4, 2


@torch.library.custom_op("test_experts::products", mutates_args=())
def products(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Products of segments, which torch has for narrower numbers alone."""
    result = tokens.new_zeros(tokens.shape[0], weights.shape[2])
    start = 0
    for number, end in enumerate(ends.tolist()):
        result[start:end] = tokens[start:end] @ weights[number]
        start = end
    return result


@torch.library.custom_op("test_experts::products_backward", mutates_args=())
def products_backward(grad: Tensor, tokens: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    of_tokens, of_weights = torch.zeros_like(tokens), torch.zeros_like(weights)
    start = 0
    for number, end in enumerate(ends.tolist()):
        of_tokens[start:end] = grad[start:end] @ weights[number].t()
        of_weights[number] = tokens[start:end].t() @ grad[start:end]
        start = end
    return of_tokens, of_weights


@products.register_fake
def _(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weights.shape[2])


@products_backward.register_fake
def _(grad: Tensor, tokens: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(weights)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*products_backward(grad, *ctx.saved_tensors), None)


products.register_autograd(_differentiated, setup_context=_keep)


class Mixture(nn.Module):
    """Layers, a router, experts (`mixed`, of each class its own), a head, and a loss that balances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(0.5 * torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(0.5 * torch.randn(NUM_EXPERTS, HIDDEN, WIDTH))
        self.shift = nn.Parameter(0.1 * torch.randn(NUM_EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        tokens = hidden.view(-1, WIDTH)
        chances = self.router(tokens).softmax(-1)
        weights, chosen = chances.topk(NUM_CHOICES, -1)
        result = self.last(hidden + self.mixed(tokens, chosen, weights).view_as(hidden))
        return (result - x).square().mean() + self.balance(chances, chosen), result

    def balance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        counts = torch.histc(chosen.float(), NUM_EXPERTS, 0, NUM_EXPERTS)
        return 0.01 * (counts / chosen.shape[0] * chances.sum(0) / chances.shape[0]).sum()

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


class Grouped(Mixture):
    """transformers: a sort, a histogram of the sorted experts, and the inverse order written by numbers."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        keys, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(keys.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        done = products(F.silu(products(tokens[order // NUM_CHOICES], self.up, ends)), self.down, ends)
        done = (done + self.shift[keys]) * weights.reshape(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0))
        return done[inverse].view(tokens.shape[0], NUM_CHOICES, WIDTH).sum(1)


class Scattered(Mixture):
    """torchtitan: a stable order, counts of the experts as they came, tokens gathered and scattered."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        counts = torch.histc(chosen.view(-1).to(torch.float32), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS)
        order = torch.argsort(chosen.view(-1), stable=True)
        scores = weights.view(-1)[order]
        places = (order // NUM_CHOICES).reshape(-1, 1).expand(-1, WIDTH)
        routed = torch.gather(tokens, 0, places) * scores.reshape(-1, 1)
        ends = torch.cumsum(counts, 0).to(torch.int32)
        done = products(F.relu(products(routed, self.up, ends)), self.down, ends)
        return torch.zeros_like(tokens).scatter_add(0, places, done)


class Chosen(Mixture):
    """Each token by weights that are looked up, added to where it came from."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        keys = chosen.flatten()
        order = keys.argsort()
        up, down = self.up[keys[order]], self.down[keys[order]]
        done = torch.bmm(torch.bmm(tokens[order // NUM_CHOICES][:, None], up).relu(), down)[:, 0]
        return torch.zeros_like(tokens).index_add(
            0, order // NUM_CHOICES, done * weights.flatten()[order][:, None]
        )

    def balance(self, chances: Tensor, chosen: Tensor) -> Tensor:
        share = F.one_hot(chosen, NUM_EXPERTS).sum((0, 1)).to(chances.dtype) / chances.shape[0]
        return 0.1 * (share * chances.mean(0)).sum()


class Numbered(Mixture):
    """The number of each token beside it, sorted along; the inverse order by a second sort."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        numbers = torch.arange(tokens.shape[0])[:, None].expand(-1, NUM_CHOICES).reshape(-1)
        keys, order = chosen.reshape(-1).sort(stable=True)
        sorted_numbers = numbers[order]
        ends = torch.histc(keys.double(), NUM_EXPERTS, -0.5, NUM_EXPERTS - 0.5).cumsum(0).to(torch.int64)
        hidden = products(tokens.index_select(0, sorted_numbers), self.up, ends)
        gate, value = hidden.chunk(2, -1)
        done = torch.cat([torch.sigmoid(gate) * value, value], -1).softmax(-1) @ self.down[0]
        done = done * weights[sorted_numbers, order % NUM_CHOICES].unsqueeze(-1)
        return done[order.argsort()].unflatten(0, (-1, NUM_CHOICES)).sum(1)


class Overflowing(Mixture):
    """Some tokens have an expert that there is not: behind all others, and no part of any segment."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.where(weights > 0.3, chosen, NUM_EXPERTS)
        keys, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(keys.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0).to(torch.int32)
        is_left_out = (keys >= NUM_EXPERTS)[:, None]
        done = products(tokens[order // NUM_CHOICES].masked_fill(is_left_out, 0.0), self.up, ends)
        done = products(done.tanh().masked_fill(is_left_out, 0.0), self.down, ends)
        done = done * weights.reshape(-1)[order][:, None]
        back = torch.zeros_like(done)
        back[order] = done
        return back.view(-1, NUM_CHOICES, WIDTH).sum(1)


class Hashed(Mixture):
    """Experts by what the input is: their counts are known before the step, of this slice all the same."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        tokens = hidden.view(-1, WIDTH)
        chosen = (x[..., :NUM_CHOICES].abs() * 100).long().view(-1, NUM_CHOICES) % NUM_EXPERTS
        result = self.last(
            hidden + Grouped.mixed(self, tokens, chosen, tokens[:, :NUM_CHOICES]).view_as(hidden)
        )  # type: ignore[arg-type]
        return (result - x).square().mean(), result


MODELS: dict[str, Callable[[], Mixture]] = {
    "grouped": Grouped,
    "scattered": Scattered,
    "chosen": Chosen,
    "numbered": Numbered,
    "overflowing": Overflowing,
    "hashed": Hashed,
}


def batch(num_rows: int, seed: int) -> Tensor:
    return torch.randn(
        num_rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
