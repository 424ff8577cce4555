"""Rows that are kept from step to step: what an operator reads is what was written for the same row, or for the one that
it continues; what is not there is an error, and outside of a step nothing is kept.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rannc_backend.kernels.kept_rows import KEEP_ROWS, KeptRows, keeping, with_real_rows

SLOT = 3


def _rows(step: int, numbers: list[int]) -> Tensor:
    """A token of each row, [rows, 2, 1, 3], that tells its row and step."""
    found: Tensor = (
        100.0 * step + 10.0 * torch.tensor(numbers).view(-1, 1, 1, 1) + torch.arange(6.0).view(2, 1, 3)
    )
    return found


def _step(store: KeptRows, step: int, parts: list[list[tuple[int, int]]], **told: bool) -> list[Tensor]:
    store.begin_step(**told)
    found = []
    with keeping(store), with_real_rows():
        for pairs in parts:
            new = _rows(step, [number for number, _ in pairs])
            found.append(KEEP_ROWS(new, torch.tensor(pairs), step + 1, SLOT))
    store.end_step()
    return found


def _same(*numbers: int) -> list[tuple[int, int]]:
    return [(number, number) for number in numbers]


def test_rows_grow_in_as_many_parts_as_micro_batches() -> None:
    store = KeptRows()
    for step in range(3):
        first, second = _step(store, step, [_same(4, 5), _same(6)])
    assert torch.equal(first, torch.cat([_rows(step, [4, 5]) for step in range(3)], 2))
    assert torch.equal(second, torch.cat([_rows(step, [6]) for step in range(3)], 2))
    assert store.widths() == {SLOT: ([2, 3], "float32")}


def test_beams_continue_each_other_across_micro_batches() -> None:
    store = KeptRows()
    _step(store, 0, [_same(0, 1), _same(2)])
    found = torch.cat(_step(store, 1, [[(0, 2), (1, 0)], [(2, 0)]], are_moved=True))
    assert torch.equal(found, torch.cat([_rows(0, [2, 0, 0]), _rows(1, [0, 1, 2])], 2))
    # Other parts than in the step before.
    found = torch.cat(_step(store, 2, [_same(0), _same(1, 2)]))
    assert torch.equal(found[:, :, 1:], torch.cat([_rows(1, [0, 1, 2]), _rows(2, [0, 1, 2])], 2))
    # The second part goes on from rows of the first, which has read them.
    found = torch.cat(_step(store, 3, [_same(0), [(1, 0), (2, 0)]], are_moved=True))
    assert torch.equal(found[:, :, 2:], torch.cat([_rows(2, [0, 0, 0]), _rows(3, [0, 1, 2])], 2))


def test_what_is_kept_whole_is_read_without_anything_new() -> None:
    store = KeptRows()
    store.begin_step()
    numbers, tokens = torch.tensor(_same(0, 1)), torch.rand(2, 2, 4, 3)
    with keeping(store), with_real_rows():
        KEEP_ROWS(tokens, numbers, 4, SLOT)
        for _ in range(2):
            store.begin_step()
            assert torch.equal(KEEP_ROWS(tokens[:, :, :0], numbers, 4, SLOT), tokens)


def test_a_row_that_is_not_there_is_an_error_and_so_is_another_length() -> None:
    store = KeptRows()
    _step(store, 0, [_same(0, 1)])
    with pytest.raises(RuntimeError, match="row 7 is not among the rows"):
        _step(store, 1, [[(0, 7)]], are_moved=True)
    _step(store, 0, [_same(0, 1)], anew=True)
    with pytest.raises(RuntimeError, match="keeps 1 tokens of a row, not 2"):
        _step(store, 2, [_same(0, 1)])
    _step(store, 0, [_same(0, 1)])
    with pytest.raises(RuntimeError, match="row 0 is not among"):
        _step(store, 1, [_same(0, 1)], anew=True)


def test_outside_of_a_step_zeros_stand_for_what_was_kept() -> None:
    store, new = KeptRows(), torch.rand(2, 2, 1, 3, dtype=torch.float64)
    store.begin_step()
    with keeping(store):
        found = KEEP_ROWS(new, torch.tensor(_same(0, 1)), 3, SLOT)
    assert torch.equal(found, torch.nn.functional.pad(new, (0, 0, 2, 0))) and not store.widths()
    with with_real_rows(), pytest.raises(RuntimeError, match="no store of kept rows"):
        KEEP_ROWS(new, torch.tensor(_same(0, 1)), 3, SLOT)


def test_the_operator_is_declared_as_torch_wants_it() -> None:
    new = torch.rand(2, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(KEEP_ROWS, (new, torch.tensor(_same(0, 1)), 3, SLOT))
    KEEP_ROWS(new, torch.tensor(_same(0, 1)), 3, SLOT).sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
