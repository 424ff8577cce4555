"""Operators of users on rows of the batch: declared ones keep rows, all others, and what cannot be right, are refused."""

from __future__ import annotations

import pytest
import torch

from rannc_backend.passes.row_wise import is_row_wise, row_wise


@torch.library.custom_op("test_row_wise::first", mutates_args=())
def first(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


@row_wise
@torch.library.custom_op("test_row_wise::second", mutates_args=())
def second(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def test_only_what_is_declared_is_row_wise() -> None:
    assert not is_row_wise(torch.ops.test_row_wise.first.default)
    assert is_row_wise(torch.ops.test_row_wise.second.default)
    assert not is_row_wise(torch.ops.aten.relu.default) and not is_row_wise(len)


def test_forms_of_a_declaration() -> None:
    assert row_wise(torch.ops.test_row_wise.first) is torch.ops.test_row_wise.first
    assert is_row_wise(torch.ops.test_row_wise.first.default)
    for wrong in (torch.relu, "name", lambda x: x):
        with pytest.raises(TypeError, match="no operator of torch.library"):
            row_wise(wrong)  # type: ignore[type-var]
