"""Models whose samples lie along another dimension of their inputs than the first: [length, batch, width], as
`nn.LSTM` and `nn.Transformer` take them by default, and hidden states [layers, batch, width].

In: nothing. Out: `MODELS`, by name: what makes one, its inputs for a number of samples and a seed, with the dimension
of samples of each, and the option that says so ("" where nothing needs to be said); `UNCLEAR`: those that are refused
without the option. Each gives its loss first, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, TOKENS = 7, 12, 20


class WordModel(nn.Module):
    """The recurrent model of PyTorch's example of language modeling: tokens [length, batch], hidden states from the call
    before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(
        self, ids: Tensor, targets: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, (state, cell) = self.rnn(self.encoder(ids), hidden)
        decoded = F.log_softmax(self.decoder(output).view(-1, TOKENS), dim=1)
        return F.nll_loss(decoded, targets.reshape(-1)), state.detach(), cell.detach()


class TransformerModel(nn.Module):
    """That of PyTorch's tutorial: `nn.TransformerEncoder` with a causal mask, and places from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.decoder = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("places", torch.randn(20, 1, WIDTH))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        length = ids.size(0)
        hidden = self.embedding(ids) * math.sqrt(WIDTH) + self.places[:length]
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=hidden.dtype), diagonal=1)
        return F.cross_entropy(self.decoder(self.encoder(hidden, mask)).view(-1, TOKENS), targets.reshape(-1))


class MaskedModel(nn.Module):
    """An encoder of [length, batch, width] with a mask of padding, which is [batch, length]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        hidden = self.encoder(x, src_key_padding_mask=padding)
        kept = ~padding.t().unsqueeze(-1)
        return (self.head(hidden) * kept).pow(2).sum() / kept.sum()


class FromHidden(nn.Module):
    """Samples first, and a hidden state [layers, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.rnn(x, hidden)
        return F.cross_entropy(self.head(output[:, -1]), labels), hidden.detach()


class Loop(nn.Module):
    """A loop over the tokens of [length, batch, width], and one label for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[1], WIDTH)
        for token in range(x.shape[0]):
            hidden = self.cell(x[token], hidden)
        return F.cross_entropy(self.head(hidden), labels)


class Pooled(nn.Module):
    """The mean of the tokens of [length, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)).mean(0)).pow(2).mean()


class Deciding(Pooled):
    """Runs as written: a value of the batch chooses its path."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(x)
        if float(x.sum()) > 1e6:
            x = x * 2
        return super().forward(x)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """See the module docstring. ``dims``: by input, of its samples."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]  # of a number of samples
    dims: dict[str, int] = field(default_factory=dict)
    option: str = ""

    def batch(self, num_rows: int, seed: int = 0) -> dict[str, Any]:
        """The inputs of a batch; the same numbers for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs(num_rows)

    def part(self, batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Some samples of a batch."""

        def cut(name: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(cut(name, each) for each in value)
            return value.narrow(self.dims.get(name, 0), start, stop - start).clone()

        return {name: cut(name, value) for name, value in batch.items()}


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _ids(num_rows: int) -> dict[str, Any]:
    return {name: torch.randint(TOKENS, (LENGTH, num_rows)) for name in ("ids", "targets")}


MODELS = {
    "word model": Entry(
        make=WordModel,
        inputs=lambda rows: {**_ids(rows), "hidden": (_floats(2, rows, WIDTH), _floats(2, rows, WIDTH))},
        dims={"ids": 1, "targets": 1, "hidden": 1},
        option="ids=1,targets=1,hidden=1",
    ),
    "transformer": Entry(make=TransformerModel, inputs=_ids, dims={"ids": 1, "targets": 1}, option="1"),
    "masked": Entry(
        make=MaskedModel,
        inputs=lambda rows: {
            "x": _floats(LENGTH, rows, WIDTH),
            "padding": torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (rows, 1)),
        },
        dims={"x": 1},
        option="1",
    ),
    "hidden": Entry(
        make=FromHidden,
        inputs=lambda rows: {
            "x": _floats(rows, LENGTH, WIDTH),
            "hidden": _floats(1, rows, WIDTH),
            "labels": torch.randint(4, (rows,)),
        },
        dims={"hidden": 1},
    ),
    "loop": Entry(
        make=Loop,
        inputs=lambda rows: {"x": _floats(LENGTH, rows, WIDTH), "labels": torch.randint(4, (rows,))},
        dims={"x": 1},
    ),
    "pooled": Entry(
        make=Pooled, inputs=lambda rows: {"x": _floats(LENGTH, rows, WIDTH)}, dims={"x": 1}, option="1"
    ),
    "deciding": Entry(
        make=Deciding, inputs=lambda rows: {"x": _floats(LENGTH, rows, WIDTH)}, dims={"x": 1}, option="1"
    ),
}
UNCLEAR = ("word model", "transformer", "pooled", "deciding")
