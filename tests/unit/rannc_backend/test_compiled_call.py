"""Arguments of a call on several ranks: tensors that begin inside of their memory are copied, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from rannc_backend import compiled_call
from rannc_backend.runtime.job import bootstrap


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "is_alone", lambda: False)


def _given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    with compiled_call._whole_memory(args, kwargs) as given:
        return given


def test_what_begins_its_memory_is_passed_as_it_is() -> None:
    x, cache = torch.arange(6.0), OrderedDict(a=torch.arange(6.0)[2:])
    parameter = torch.nn.Parameter(torch.arange(6.0)[2:])
    nested = [x, {"x": x[:2]}, None, 3, torch.eye(2).to_sparse()]
    args, kwargs = _given(x, nested, parameter, cache=cache)
    assert args[0] is x and args[1] is nested and args[2] is parameter and kwargs["cache"] is cache


def test_slices_begin_their_memory_with_the_same_values_and_gradients() -> None:
    whole = torch.arange(6.0, requires_grad=True)
    piece = whole[2:]
    (one, (two, other)), kwargs = _given(piece, (piece, {"y": whole.detach()[3:], "n": 1}))
    assert one is two and one.storage_offset() == 0 and torch.equal(one, piece)
    assert other["y"].tolist() == [3, 4, 5] and other["y"].storage_offset() == 0 and other["n"] == 1
    assert kwargs == {}
    (one * 2).sum().backward()
    assert whole.grad is not None and whole.grad.tolist() == [0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_the_same_strides(rank: int) -> None:
    batch = torch.arange(24.0).reshape(6, 4)
    args, _ = _given(batch[3 * rank :][:3, 1:], batch[3 * rank :][:3, :-1], batch.t()[:, 3 * rank :][:, :3])
    assert [each.stride() for each in args] == [(3, 1), (3, 1), (3, 1)]
    assert all(each.storage_offset() == 0 for each in args) and torch.equal(
        args[2], batch[3 * rank :][:3].t()
    )


def test_what_a_call_writes_is_written_to_the_slice() -> None:
    whole = torch.zeros(6)
    read, written = whole[1:3], whole[3:]
    with compiled_call._whole_memory((read, written), {}) as (args, _):
        args[1].add_(1.0)
    assert whole.tolist() == [0, 0, 0, 1, 1, 1] and read._version == written._version == 1


def test_one_process_passes_slices_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "is_alone", lambda: True)
    piece = torch.zeros(6)[2:]
    assert _given(piece)[0][0] is piece
