"""Inputs are padded at their ends to the longest of all ranks, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rannc_backend.errors import RanksDifferError, UserInputError
from rannc_backend.padded_call import padded_arguments


class Model(nn.Module):
    """Two inputs, a number, and a dict."""

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, *, batch: Any = None, scale: float = 1.0
    ) -> None:
        return


def padded(others: list[dict[str, list[int]]], *args: Any, paddings: dict[str, float], **kwargs: Any) -> Any:
    """Of one rank among others with these shapes."""
    return padded_arguments(Model(), args, kwargs, paddings=paddings, exchange=lambda own: [own, *others])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9), st.integers(-5, 5))
def test_to_the_longest_with_the_value(others: list[int], own: int, value: int) -> None:
    ids, labels = torch.arange(1, 2 * own + 1).view(2, own), torch.ones(2, own, dtype=torch.bool)
    shapes = [{"ids": [3, length], "labels": [3, length]} for length in others]
    (made,), kwargs = padded(shapes, ids, labels=labels, paddings={"ids": value, "labels": False}, scale=2.0)
    longest = max(own, *others)
    assert made.shape == kwargs["labels"].shape == (2, longest) and kwargs["scale"] == 2.0
    assert torch.equal(made[:, :own], ids) and bool((made[:, own:] == value).all())
    assert not kwargs["labels"][:, own:].any() and kwargs["labels"].dtype == torch.bool


def test_all_dimensions_but_the_first() -> None:
    images = torch.ones(2, 3, 4, 5)
    (made,), _ = padded([{"ids": [7, 3, 6, 5]}], images, paddings={"ids": -1.0})
    assert (
        made.shape == (2, 3, 6, 5)
        and torch.equal(made[:, :, :4], images)
        and bool((made[:, :, 4:] == -1).all())
    )


def test_what_has_one_shape_stays_itself() -> None:
    ids = torch.ones(2, 4)
    (made,), kwargs = padded(
        [{"ids": [5, 4], "batch_x": [5, 2]}], ids, batch={"x": ids[:, :2]}, paddings={"ids": 0}
    )
    assert made is ids and kwargs["batch"]["x"].shape == (2, 2)


def test_an_input_without_a_value_is_refused() -> None:
    ids = torch.ones(2, 4)
    with pytest.raises(RanksDifferError, match=r"(?s)input labels.*collator.*pad_inputs") as found:
        padded([{"ids": [2, 4], "labels": [2, 6]}], ids, ids + 1, paddings={"ids": 0})
    assert found.value.odd_ranks == (1,)


def test_a_name_that_is_no_input_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"names input_ids.*inputs of Model are ids, labels"):
        padded([], torch.ones(2, 4), torch.ones(2, 4), paddings={"input_ids": 0})
