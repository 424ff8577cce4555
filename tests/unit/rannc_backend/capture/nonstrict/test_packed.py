"""Packed sequences train as in torch, for every length, and what reads their tokens otherwise is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from rannc_backend.errors import ModelError
from rannc_backend.session_registry import REGISTRY
from tests.default_dtype import float64

WIDTH, STATE = 4, 6


class Tagger(nn.Module):
    """The documents' use: pack, run, unpack; `then` is what is done to the packed outputs."""

    def __init__(
        self,
        make: Callable[..., nn.Module] = nn.LSTM,
        *,
        is_sorted: bool = True,
        batch_first: bool = True,
        total: bool = True,
        then: Callable[[PackedSequence], Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.layer = make(WIDTH, STATE, batch_first=batch_first, **settings)
        self.head = nn.Linear(STATE * (1 + settings.get("bidirectional", False)), 3)
        self.is_sorted, self.batch_first, self.total, self.then = is_sorted, batch_first, total, then

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=self.is_sorted)
        packed, states = self.layer(packed)
        if self.then is not None:
            return self.then(packed)
        total = {"total_length": x.shape[1 if self.batch_first else 0]} if self.total else {}
        output, again = pad_packed_sequence(packed, batch_first=True, padding_value=0.5, **total)
        last = states[0] if isinstance(states, tuple) else states
        mean = self.head(output).tanh().sum(1) / again[:, None]
        return mean.pow(2).mean() + last.pow(2).mean()


def _batch(length: int, *, is_sorted: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    lengths = torch.tensor([length, length - 1, 3, 1] if is_sorted else [2, length, 1, length - 1])
    return torch.randn(4, length, WIDTH, generator=generator, dtype=torch.float64), lengths


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"is_sorted": False, "batch_first": False, "total": False}),
        (nn.GRU, {"total": False}),
        (nn.GRU, {"is_sorted": False, "bidirectional": True}),
        (nn.RNN, {"batch_first": False, "num_layers": 2}),
    ],
    ids=["lstm", "unsorted", "longest", "both ways", "tokens first"],
)
def test_training_is_torchs_for_every_length(
    make: Callable[..., nn.Module], settings: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with float64():
        model = Tagger(make, **settings)
        alone = copy.deepcopy(model)
        compiled = torch.compile(model, backend="rannc", options={"plan_cache": False})
        for length in (7, 9, 5):
            batch = _batch(length, is_sorted=settings.get("is_sorted", True))
            loss, expected = compiled(*batch), alone(*batch)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-13)
    assert len(REGISTRY.sessions[model].compiled) == 2


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda packed: packed.data.pow(2).mean(), "reads the tokens of a packed sequence"),
        (
            lambda packed: packed.data.shape[0] * packed.data.new_ones(()),
            "reads the tokens of a packed sequence",
        ),
        (lambda packed: packed.batch_sizes.sum() * 1.0, "reads the tokens of a packed sequence"),
        (lambda packed: packed, "gives a packed sequence"),
        (lambda packed: pad_packed_sequence(packed, batch_first=True, total_length=9)[0], "another length"),
    ],
    ids=["mean", "number", "sizes", "given", "longer"],
)
def test_what_reads_the_tokens_is_refused(then: Callable[[PackedSequence], Any], reason: str) -> None:
    torch._dynamo.reset()
    with float64(), pytest.raises(ModelError, match=reason):
        torch.compile(Tagger(then=then), backend="rannc", options={"capture": "nonstrict"})(
            *_batch(7, is_sorted=True)
        )


def test_a_batch_that_is_longer_than_its_longest_row_is_refused_without_a_total() -> None:
    torch._dynamo.reset()
    x, lengths = _batch(7, is_sorted=True)
    with float64(), pytest.raises(ModelError, match=r"(?s)shorter than what was packed.*total_length"):
        torch.compile(Tagger(total=False), backend="rannc")(x, lengths.clamp(max=5))


def test_sequences_of_their_own_are_refused() -> None:
    """`pack_sequence` pads a list first, whose rows have no dimension of the batch."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, STATE)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.layer(pack_sequence([first, second]))[1].sum()

    torch._dynamo.reset()
    with float64(), pytest.raises(ModelError):
        torch.compile(Lists(), backend="rannc")(torch.randn(5, WIDTH), torch.randn(3, WIDTH))
