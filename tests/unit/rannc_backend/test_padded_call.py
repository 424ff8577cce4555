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
    made, named, _ = padded_with_check(others, *args, paddings=paddings, **kwargs)
    return made, named


def padded_with_check(
    others: list[dict[str, list[int]]], *args: Any, paddings: dict[str, float], **kwargs: Any
) -> Any:
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


@pytest.mark.parametrize("own", [4, 6])
def test_values_of_padded_places_are_refused_without_a_loss(own: int) -> None:
    """On the ranks that were padded and on the longest."""
    ids = torch.ones(2, own, dtype=torch.long)
    others = [{"ids": [1, 4]}, {"ids": [3, 6]}]
    *_, check = padded_with_check(others, ids, paddings={"ids": 0})
    for result in (
        torch.ones(2, 6, 11),
        {"logits": torch.ones(2, 6)},
        (torch.ones(2, 3, 6), torch.ones(2, 6)),
    ):
        with pytest.raises(UserInputError, match=r"has padded ids to 6.*(?s:.*)generation\.generate"):
            check(result)
    check({"loss": torch.ones(()), "logits": torch.ones(2, 6, 11)})
    check(torch.ones(2, 3))
    check(torch.ones(6, 3, 6))
    check("nothing")


def test_values_of_ranks_with_one_length_are_theirs() -> None:
    *_, check = padded_with_check([{"ids": [1, 4]}], torch.ones(2, 4), paddings={"ids": 0})
    check(torch.ones(2, 4, 11))
