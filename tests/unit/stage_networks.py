"""Networks for the tests of stages, each with the function that is captured: (model, *inputs) -> (row output,
partial sum).

In: nothing. Out: `NETWORKS` by name. Terms: a *network* is a module in float64 with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`build` and `inputs` (by number of rows) draw random numbers; `function` is what is captured."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], list[Tensor]]
    function: Callable[..., Pair]
    batch_statistics: bool = False


def _with_square_sum(model: nn.Module, *inputs: Tensor) -> Pair:
    result = model(*inputs)
    return result, (result * result).sum()


def _logits(model: nn.Module, tokens: Tensor) -> Pair:
    logits = model(input_ids=tokens).logits
    return logits, (logits * logits).sum()


class CumulativeProduct(nn.Module):
    """The backward of its operator changes values of its own in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumprod(1)


class SkipNetwork(nn.Module):
    """Its first value is used by the second and by the last layer, and the input by the last as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        value = first
        for layer in list(self.layers)[1:4]:
            value = torch.tanh(layer(value))
        return self.layers[4](value * first + x)


class TiedNetwork(nn.Module):
    """The embedding is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


class AwkwardNetwork(nn.Module):
    """Transposes, slices, sums of parameters, a batch merged with time, and constants in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(6))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # [rows, 4, 6]
        value = (x + self.first + self.second) * self.frozen
        turned = value.transpose(1, 2)  # not contiguous: a cut behind it sends a copy
        merged = self.mix(torch.sin(turned).transpose(1, 2).reshape(-1, 6))
        parts = merged.view(x.shape[0], 4, 6).chunk(2, dim=1)
        mask = torch.ones(x.shape[0], 2, dtype=x.dtype).cumsum(1).unsqueeze(-1)
        return (
            parts[0] * mask + parts[1] * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=x.dtype)
        ).expand(-1, 2, 6)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 23, "n_positions": 12}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 23,
        "intermediate_size": 32,
    }
    quiet = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForMaskedLM(BertConfig(**sizes, **quiet, max_position_embeddings=12))


def _tokens(vocabulary: int) -> Callable[[int], list[Tensor]]:
    return lambda rows: [torch.randint(0, vocabulary, (rows, 8))]


def _normal(*shape: int) -> Callable[[int], list[Tensor]]:
    return lambda rows: [torch.randn(rows, *shape, dtype=torch.float64)]


def _perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers)


def _cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), CumulativeProduct(), nn.Linear(6, 6))


NETWORKS = {
    "perceptron": Network(build=_perceptron, inputs=_normal(6), function=_with_square_sum),
    "convolutions": Network(
        build=_convolutions, inputs=_normal(3, 8, 8), function=_with_square_sum, batch_statistics=True
    ),
    "skip": Network(build=SkipNetwork, inputs=_normal(6), function=_with_square_sum),
    "tied": Network(build=TiedNetwork, inputs=_tokens(11), function=_with_square_sum),
    "awkward": Network(build=AwkwardNetwork, inputs=_normal(4, 6), function=_with_square_sum),
    "cumulative": Network(build=_cumulative, inputs=_normal(6), function=_with_square_sum),
    "gpt2": Network(build=_gpt2, inputs=_tokens(23), function=_logits),
    "bert": Network(build=_bert, inputs=_tokens(23), function=_logits),
}
