"""The models that the distributed tests train: small, random weights, one for each thing that can go wrong.

In: nothing. Out: `ENTRIES` by name, and `entry(name)`. The Hugging Face ones are in models_huggingface.py and
are imported only when asked for. Terms as in model_entry.py. The first block repeats the ten models of
RaNNC's test suite and its spare ones (normalisation, nesting, tied embedding, identity); the second has one
model per point of the semantics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_batches import labelled_tokens, normal, regression, tokens
from tests.model_entry import Batch, Entry
from tests.models_layers import ChannelsLast, Gated, Parted, SpectralNorm, TiedRing
from tests.models_rannc import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    Basic,
    CustomOperator,
    Embedding,
    ForkJoin,
    Function,
    HandLayerNorm,
    LossOut,
    Nested,
    OneNorm,
    OneOp,
    SharedInput,
    SharedParam,
    SmallParam,
    TensorMul,
    TiedEmbedding,
)


def _squared_error(outputs: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(outputs, batch["target"])


def _itself(outputs: Tensor, batch: Batch) -> Tensor:
    return outputs


def _first(outputs: Any, batch: Batch) -> Tensor:
    return outputs[0]


def _no_rows(outputs: Any) -> Mapping[str, Tensor]:
    return {}


class Mlp(nn.Module):
    """Five layers, enough for four stages, which are then of different sizes."""

    def __init__(self, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity() for _ in range(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = x + self.dropout(torch.tanh(norm(layer(x))))
        return x


class MlpLoss(nn.Module):
    """The five layers with the loss inside and the prediction beside it, as Hugging Face models have it."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = Mlp(dropout=dropout)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return F.mse_loss(y, target), y


class LongSkip(nn.Module):
    """The first value is used again after every third later layer and at the end: three stages later and in
    between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        y = first
        for index, layer in enumerate(self.layers[1:]):
            y = torch.tanh(layer(y))
            if index % 3 == 2:
                y = y * first
        return y + first + x


class LongSkipLoss(nn.Module):
    """The long skip with the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LongSkip()

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return F.mse_loss(y, target), y


class Frozen(nn.Module):
    """Frozen layers at the start, in the middle, and a frozen embedding of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        for index in (0, 1, 4, 7):
            self.layers[index].requires_grad_(False)
        self.layers[5].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


class Lora(nn.Module):
    """A frozen base with trained low-rank parts, the second of each starting at small values."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)
        self.downs = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.bases, self.downs, self.ups):
            x = torch.tanh(base(x) + 0.5 * up(down(x)))
        return x


class SeveralOutputs(nn.Module):
    """Rows from an early, a middle and the last layer, a scalar, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, int]:
        early = torch.tanh(self.layers[0](x))
        middle = early
        for layer in self.layers[1:3]:
            middle = torch.tanh(layer(middle))
        last = middle
        for layer in self.layers[3:]:
            last = torch.tanh(layer(last))
        return early, middle.unsqueeze(1), last, (last * early).mean(), None, 7


@dataclass
class Prediction:
    """A user's own output class."""

    loss: Tensor
    hidden: Tensor
    logits: Tensor


class DataclassOutput(nn.Module):
    """Keyword inputs with a nested dict, and a dataclass as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, *, features: Tensor, extra: dict[str, Tensor] | None = None, labels: Tensor
    ) -> Prediction:
        if extra is not None:
            features = features + extra["shift"]
        hidden = self.body(features)
        logits = self.head(hidden)
        return Prediction(loss=F.cross_entropy(logits, labels), hidden=hidden, logits=logits)


class DictOutput(nn.Module):
    """Keyword inputs, and a nested dict as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, features: Tensor, shift: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.body(features + shift)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "rows": {"hidden": hidden, "logits": [logits]}}


class NoBatchInput(nn.Module):
    """A table that all rows share comes as an input, used in the first and in the last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.body(x @ table) @ table.t() + table.sum()


class UnusedParameter(nn.Module):
    """Parameters that never get a gradient: nothing uses one, and others only give a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.shape = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y + self.shape(x).new_zeros(y.shape)


class AuxiliaryLoss(nn.Module):
    """A middle layer adds a product of batch means to the loss, as a mixture of experts balances its load."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        auxiliary = x.new_zeros(())
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if index == 2:
                shares = self.router(x).softmax(-1)
                auxiliary = 3 * (shares.mean(0) * (shares * shares).mean(0)).sum()
        main = F.mse_loss(x, target)
        return main + 0.1 * auxiliary, auxiliary, x


class RootLoss(nn.Module):
    """The loss is a nonlinear function of sums over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.body(x)
        return torch.sqrt(F.mse_loss(y, target)) + (y * target).sum() / (y * y).sum()


class Padded(nn.Module):
    """Cross entropy with ignored labels: the divisor is a count over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(self.embedding(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits


class RandomRows(nn.Module):
    """Dropout on a function of degree one in every weight: <weight, gradient> equals the loss if masks agree.

    The element-wise mask is visible in the output, which is zero exactly where it was dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.dropout(F.relu(layer(x)) + 0.5 * layer(x))
        return x.abs().sum(), x


def _image(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return {
        "x": normal(generator, rows, 1, 32, 32, dtype=dtype),
        "target": normal(generator, rows, 10, dtype=dtype),
    }


def _two_inputs(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return {"x": normal(generator, rows, 3, dtype=dtype), "y": normal(generator, rows, 3, dtype=dtype)}


def _keywords(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return {
        "labels": torch.randint(VOCABULARY, (rows,), generator=generator),
        "features": normal(generator, rows, WIDTH, dtype=dtype),
        "shift": normal(generator, rows, WIDTH, dtype=dtype),
    }


def _no_shift(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = _keywords(rows, generator, dtype)
    del batch["shift"]
    return batch


def _with_table(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return regression(WIDTH)(rows, generator, dtype) | {"table": normal(generator, WIDTH, WIDTH, dtype=dtype)}


def _outside(name: str, module: Any, width: int, *, make_batch: Any = None, **options: Any) -> Entry:
    return Entry(
        name=name,
        build=lambda dtype: module().to(dtype),
        make_batch=make_batch or regression(width),
        loss_of=_squared_error,
        outside=frozenset({"target"}),
        **options,
    )


def _inside(name: str, module: Any, make_batch: Any, **options: Any) -> Entry:
    defaults: dict[str, Any] = {"rows_of": lambda outputs: {"rows": outputs[-1]}, "loss_of": _first}
    return Entry(
        name=name,
        build=lambda dtype: module().to(dtype),
        make_batch=make_batch,
        loss_inside=True,
        **(defaults | options),
    )


RANNC_SUITE: tuple[Entry, ...] = (
    _outside("small_param", SmallParam, 3),
    _outside("shared_input", SharedInput, 3),
    _outside("fork_join", ForkJoin, 3),
    _outside("shared_param", SharedParam, 3, shared=frozenset({"fc1.weight"})),
    _outside("one_op", OneOp, 10, trains=False),
    _outside("tensor_mul", TensorMul, 10, trains=False),
    _outside("embedding", Embedding, 8, make_batch=tokens(16, target_width=8)),
    _outside("function", Function, 8, make_batch=tokens(16, target_width=8)),
    _inside("loss_out", LossOut, _two_inputs, positional=("x", "y"), rows_of=_no_rows, loss_of=_itself),
    _outside("basic", Basic, 10, make_batch=_image),
)
RANNC_SPARE: tuple[Entry, ...] = (
    _outside("nested", Nested, 3, shared=frozenset({"inner.fc1.weight", "inner.fc2.weight"})),
    _inside(
        "tied_embedding",
        TiedEmbedding,
        labelled_tokens,
        positional=("x", "labels"),
        deep=True,
        shared=frozenset({"embedding.weight"}),
    ),
    _outside("layer_norm", HandLayerNorm, 3),
    _outside("custom_operator", CustomOperator, 3),
    _outside("identity", nn.Identity, 10, trains=False),
    _outside(
        "norm_affine", lambda: OneNorm(affine=True, track_running_stats=False), 10, batch_statistics=True
    ),
    _outside(
        "norm_running", lambda: OneNorm(affine=False, track_running_stats=True), 10, batch_statistics=True
    ),
    _outside(
        "norm_plain", lambda: OneNorm(affine=False, track_running_stats=False), 10, batch_statistics=True
    ),
)
CONTRACT: tuple[Entry, ...] = (
    _outside("mlp", Mlp, WIDTH, deep=True),
    _inside("mlp_loss", MlpLoss, regression(WIDTH), positional=("x", "target"), deep=True),
    _inside(
        "tied_ring",
        TiedRing,
        regression(WIDTH),
        positional=("x", "target"),
        shared=frozenset(f"layers.{i}.weight" for i in range(3)),
    ),
    _outside("long_skip", LongSkip, WIDTH, deep=True),
    _inside("long_skip_loss", LongSkipLoss, regression(WIDTH), positional=("x", "target"), deep=True),
    _outside("frozen", Frozen, WIDTH),
    _outside("lora", Lora, WIDTH, deep=True),
    _outside("spectral_norm", SpectralNorm, WIDTH, deep=True),
    _inside("gated", Gated, regression(WIDTH), positional=("x", "target")),
    _outside(
        "channels_last",
        ChannelsLast,
        WIDTH,
        make_batch=lambda rows, generator, dtype: {
            "x": normal(generator, rows, 3, 6, 6, dtype=dtype),
            "target": normal(generator, rows, WIDTH, dtype=dtype),
        },
        deep=True,
    ),
    _inside(
        "dropout",
        RandomRows,
        lambda rows, generator, dtype: {"x": normal(generator, rows, WIDTH, dtype=dtype)},
        deep=True,
    ),
    # The biases in front of its norms have a gradient of zero.
    _outside(
        "batch_norm", lambda: Mlp(batch_norm=True), WIDTH, deep=True, batch_statistics=True, adam_epsilon=1e-4
    ),
    _inside(
        "several_outputs",
        SeveralOutputs,
        lambda rows, generator, dtype: {"x": normal(generator, rows, WIDTH, dtype=dtype)},
        loss_of=lambda outputs, batch: outputs[3],
        rows_of=lambda outputs: {"early": outputs[0], "middle": outputs[1], "last": outputs[2]},
        deep=True,
    ),
    _inside(
        "dict_output",
        DictOutput,
        _keywords,
        positional=(),
        loss_of=lambda outputs, batch: outputs["loss"],
        rows_of=lambda outputs: {"hidden": outputs["rows"]["hidden"], "logits": outputs["rows"]["logits"][0]},
        deep=True,
    ),
    _inside(
        "dataclass_output",
        DataclassOutput,
        _no_shift,
        positional=(),
        loss_of=lambda outputs, batch: outputs.loss,
        rows_of=lambda outputs: {"hidden": outputs.hidden, "logits": outputs.logits},
        deep=True,
    ),
    _outside(
        "no_batch_input",
        NoBatchInput,
        WIDTH,
        make_batch=_with_table,
        positional=("x", "table"),
        replicated=frozenset({"table"}),
        deep=True,
    ),
    _outside("unused_parameter", UnusedParameter, WIDTH, deep=True),
    _inside(
        "auxiliary_loss",
        AuxiliaryLoss,
        regression(WIDTH),
        positional=("x", "target"),
        scalars_of=lambda outputs: {"auxiliary": outputs[1]},
        deep=True,
    ),
    _inside(
        "root_loss",
        RootLoss,
        regression(WIDTH),
        positional=("x", "target"),
        loss_of=_itself,
        rows_of=_no_rows,
        deep=True,
    ),
    _inside("padded", Padded, labelled_tokens, positional=("x", "labels"), deep=True),
    _inside("parted", Parted, regression(WIDTH), positional=("x", "target")),
)
ENTRIES: Mapping[str, Entry] = {entry.name: entry for entry in RANNC_SUITE + RANNC_SPARE + CONTRACT}
HUGGING_FACE_NAMES: tuple[str, ...] = ("gpt2", "gpt2_cache", "bert", "llama", "mixtral", "vit", "resnet")


def entry(name: str) -> Entry:
    """The entry of that name.

    Raises:
        KeyError: there is none.
    """
    if name in HUGGING_FACE_NAMES:
        from tests.models_huggingface import HUGGING_FACE  # noqa: PLC0415 - two seconds that most runs can save

        return HUGGING_FACE[name]
    return ENTRIES[name]
