"""Models whose inputs change their lengths and sizes from call to call, as the documents of PyTorch and
transformers write them.

In: nothing. Out: for each, how to make it, its inputs of a size, the sizes to call it with, and how often it is
compiled for those from 2 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 31, 16
LENGTHS = (9, 14, 30, 2, 17, 5, 26, 40, 3, 12, 33, 8, 21, 4, 29, 11, 38, 6, 19, 24)
IMAGE_SIZES = (16, 24, 20, 36, 28)

Inputs = Mapping[str, Tensor]


class LanguageModel(nn.Module):
    """The tutorial's: embedding, positions, layers with a causal mask, and a loss over flat tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        hidden = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        scores = self.head(self.layers(hidden, mask, is_causal=True))
        loss = functional.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1), ignore_index=-100)
        return loss, scores


class FlatTokens(nn.Module):
    """Tokens in one dimension, means over all of them, and dropout there."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = ids.shape
        flat = self.tokens(ids).reshape(rows * length, WIDTH)
        scores = self.head(flat + self.mix(flat) / length).view(rows, length, VOCABULARY)
        losses = functional.cross_entropy(scores.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return losses.mean() + scores.pow(2).mean() / 100, scores


class Translator(nn.Module):
    """`nn.Transformer` with two lengths; it looks at its mask, so Dynamo refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.transformer(self.tokens(ids), self.tokens(inputs), tgt_mask=mask)
        scores = self.head(hidden)
        return functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100), scores


class Branches(nn.Module):
    """A path of its own for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.short, self.long = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.tokens(ids)
        scores = self.long(hidden) if ids.shape[1] > 16 else self.short(hidden)
        return functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100), scores


class Recurrent(nn.Module):
    """The tutorial's tagger with two layers in both directions, and dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.LSTM(WIDTH, 12, 2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.layers(self.tokens(ids))[0])
        return functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100), scores


class Speech(nn.Module):
    """Convolutions over time and the CTC loss; labels are those of the last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.over_time(self.tokens(ids).transpose(1, 2)).relu().transpose(1, 2)
        scores = self.head(hidden)
        lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.long)
        wanted = (labels[:, -1].clamp(min=0) % 2) + 1
        targets = torch.cat([labels[:, :1], labels[:, -1:]], 1).clamp(min=1)
        log_probs = scores.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(log_probs, targets, lengths, wanted, zero_infinity=True), scores


class Classifier(nn.Module):
    """Images of any size, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.features(images))
        return functional.cross_entropy(scores, labels), scores


class Segmenter(nn.Module):
    """Down, up, and resized to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.up(self.down(images).relu()))
        scores = functional.interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)
        return functional.cross_entropy(scores, labels), scores


def text_batch(rows: int, length: int, step: int) -> Inputs:
    """Tokens and labels [rows, length], some of them left out."""
    generator = torch.Generator().manual_seed(100 * step + length)
    ids, labels = (torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(2))
    labels[0, 0] = -100
    return {"ids": ids, "labels": labels}


def image_batch(rows: int, size: int, step: int, *, per_pixel: bool = False) -> Inputs:
    """Images [rows, 3, size, size + 4 or so]: each third one is square."""
    generator = torch.Generator().manual_seed(100 * step + size)
    shape = (size, size + 4 * (step % 3))
    labels = torch.randint(0, 5, (rows, *shape) if per_pixel else (rows,), generator=generator)
    return {
        "images": torch.randn(rows, 3, *shape, generator=generator, dtype=torch.float64),
        "labels": labels,
    }


@dataclass(frozen=True)
class Entry:
    """See the module docstring."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Inputs]
    sizes: tuple[int, ...]
    num_compilations: int


def _transformer(name: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes, **settings))
    return made


class Bert(nn.Module):
    """transformers' BERT in the words of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = _transformer(
            "BertForMaskedLM", "BertConfig", intermediate_size=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = self.bert(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels)
        return result.loss, result.logits


#: The first call is compiled for its own size, the second for all from 2 on; then for paths of the model's own.
MODELS: Mapping[str, Entry] = {
    "language_model": Entry(LanguageModel, text_batch, LENGTHS, 2),
    "flat_tokens": Entry(FlatTokens, text_batch, LENGTHS[:6], 2),
    # Of two tokens it shifts one, and sizes of 1 are another path.
    "translator": Entry(Translator, text_batch, LENGTHS[:6], 3),
    "recurrent": Entry(Recurrent, text_batch, LENGTHS[:8], 2),
    "speech": Entry(Speech, text_batch, LENGTHS[:3], 2),
    "bert": Entry(Bert, text_batch, LENGTHS[:6], 2),
    "branches": Entry(Branches, text_batch, LENGTHS[:8], 3),
    # The first is square, which the two sizes of the second are not.
    "classifier": Entry(Classifier, image_batch, IMAGE_SIZES, 2),
    "segmenter": Entry(Segmenter, functools.partial(image_batch, per_pixel=True), IMAGE_SIZES, 2),
}
