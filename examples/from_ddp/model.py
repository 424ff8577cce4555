"""The model and the data of docs/getting_started.md: a small language model, and rows that every script draws
alike.
"""

from __future__ import annotations

import torch
from torch import nn

BATCH, LENGTH, WORDS, WIDTH = 16, 32, 256, 64


class Block(nn.Module):
    """Attention and two linear layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.layers(self.norms[1](hidden))


class LanguageModel(nn.Module):
    """Words to the mean loss of the next word."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.blocks(self.embedding(words[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def batches(num_steps: int) -> list[torch.Tensor]:
    """Rows of words of all ranks together; each word is the one before plus one, or plus two."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, WORDS, (num_steps, BATCH, 1), generator=generator)
    steps = torch.randint(1, 3, (num_steps, BATCH, LENGTH), generator=generator)
    return list((starts + steps.cumsum(2)) % WORDS)
