"""A plain GPT-2-like model that can be trained as a whole or cut by hand into consecutive parts.

In: sizes. Out: `Gpt` (returns its loss), and `parts` for the rival pipeline: the same modules in num_parts
pieces, the last of which returns logits. Shapes: tokens [B, T], hidden values [B, T, width], logits [B, T,
vocabulary].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model and its global batch."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    length: int
    rows: int


class Block(nn.Module):
    """Attention and MLP with layer norms in front."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = nn.Linear(sizes.width, 3 * sizes.width)
        self.projection = nn.Linear(sizes.width, sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embeddings(nn.Module):
    """Words and positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.length, sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.positions


class Head(nn.Module):
    """Final norm and logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.logits = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token; equal numbers of tokens in every row."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Gpt(nn.Module):
    """The whole model with its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.pieces = nn.Sequential(
            Embeddings(sizes), *(Block(sizes) for _ in range(sizes.num_layers)), Head(sizes)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.pieces(tokens), tokens)


def parts(model: Gpt, num_parts: int) -> list[nn.Sequential]:
    """The model's modules in consecutive parts with equally many blocks, as one cuts by hand."""
    pieces = list(model.pieces)
    blocks = pieces[1:-1]
    bounds = [round(index * len(blocks) / num_parts) for index in range(num_parts + 1)]
    cut = [blocks[start:stop] for start, stop in zip(bounds, bounds[1:])]
    cut[0] = [pieces[0], *cut[0]]
    cut[-1] = [*cut[-1], pieces[-1]]
    return [nn.Sequential(*members) for members in cut]
