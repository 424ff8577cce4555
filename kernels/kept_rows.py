"""An operator that puts what was kept of each row before what is new of it: a key-value cache that stays on its stage.

In: the new part of each row, [rows, ..., new, width], and the rows' numbers. Out: [rows, ..., length, width], which are
kept for the next step. Outside of a step (a trial, a measurement, a rehearsal), zeros stand for what was kept.

Terms. A *slot* is a number for what one place of the model keeps, such as the keys of one layer. Rows have *numbers*,
[rows, 2]: what a row is called in this step, and the row of the step before that it continues, which is another one where
beams change places. The *store* (`KeptRows`) has the rows that this rank computes, in as many parts as micro-batches.
Reference: `torch.cat` of the rows that are continued and the new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("rannc", "FRAGMENT")
_LIBRARY.define("keep_rows(Tensor new, Tensor numbers, SymInt length, int slot) -> Tensor")

_Part = tuple[list[int], Tensor]


class KeptRows:
    """What this rank keeps from step to step."""

    __slots__ = ("_are_moved", "_before", "_now")

    def __init__(self) -> None:
        self._before: dict[int, list[_Part]] = {}
        self._now: dict[int, list[_Part]] = {}
        self._are_moved = False

    def begin_step(self, *, are_moved: bool = False, anew: bool = False) -> None:
        """Before a step. ``are_moved``: some row continues another one, or several do the same. ``anew``: nothing that
        was kept is read.
        """
        self._before, self._now = {} if anew else self._now, {}
        self._are_moved = are_moved

    def end_step(self) -> None:
        """Let go of what was kept before the step."""
        self._before = {}

    def widths(self) -> dict[int, tuple[list[int], str]]:
        """Of each slot: the sizes of a row without its length, and the dtype's name."""
        return {
            slot: ([*each.shape[1:-2], each.shape[-1]], str(each.dtype).removeprefix("torch."))
            for slot, ((_, each), *_) in self._now.items()
        }

    def extended(self, new: Tensor, numbers: Sequence[Sequence[int]], length: int, slot: int) -> Tensor:
        """The rows' kept part and ``new``, which are kept in its place."""
        found = new.new_empty((*new.shape[:-2], length, new.shape[-1]))
        missing = length - new.shape[-2]
        if missing:
            found[..., :missing, :] = self._continued(slot, [before for _, before in numbers], missing)
        found[..., missing:, :] = new
        self._now.setdefault(slot, []).append(([number for number, _ in numbers], found))
        return found

    def _continued(self, slot: int, wanted: list[int], length: int) -> Tensor:
        parts = self._before.get(slot, [])
        for position, (numbers, kept) in enumerate(parts):
            if numbers == wanted:
                if not self._are_moved:
                    del parts[position]  # nobody else reads it
                return _of_length(kept, length, slot)
        places = {number: place for place, number in enumerate(each for part, _ in parts for each in part)}
        if lost := sorted(set(wanted) - set(places)):
            raise RuntimeError(
                f"row {lost[0]} is not among the rows that this rank keeps in slot {slot}: rows have moved "
                "to other ranks between two steps"
            )
        kept = torch.cat([_of_length(kept, length, slot) for _, kept in parts])
        return kept.index_select(0, torch.tensor([places[each] for each in wanted], device=kept.device))


def _of_length(kept: Tensor, length: int, slot: int) -> Tensor:
    if kept.shape[-2] != length:
        raise RuntimeError(f"slot {slot} keeps {kept.shape[-2]} tokens of a row, not {length}")
    return kept


# Graphs hold tensors and numbers only, so the store is known by who calls.
_STORE: ContextVar[KeptRows | None] = ContextVar("kept rows", default=None)
_IN_STEP: ContextVar[bool] = ContextVar("rows are real", default=False)


@contextlib.contextmanager
def keeping(store: KeptRows) -> Iterator[None]:
    """Around steps that read and write ``store``."""
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


@contextlib.contextmanager
def with_real_rows() -> Iterator[None]:
    """Around a step whose rows are those of the caller, not examples."""
    token = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(token)


def _keep_rows(new: Tensor, numbers: Tensor, length: int, slot: int) -> Tensor:
    if not _IN_STEP.get():
        found = new.new_zeros((*new.shape[:-2], length, new.shape[-1]))
        found[..., length - new.shape[-2] :, :] = new
        return found
    store = _STORE.get()
    if store is None:
        raise RuntimeError("no store of kept rows: the step was not made by a call that keeps them")
    return store.extended(new, numbers.tolist(), length, slot)


def _shown(new: Tensor, numbers: Tensor, length: int, slot: int) -> Tensor:
    return new.new_empty((*new.shape[:-2], length, new.shape[-1]))


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.num_new = inputs[0].shape[-2]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    """Of the new part: what was kept is data."""
    return gradient[..., gradient.shape[-2] - ctx.num_new :, :], None, None, None


_LIBRARY.impl("keep_rows", _keep_rows, "CompositeExplicitAutograd")
torch.library.register_fake("rannc::keep_rows", _shown, lib=_LIBRARY)
torch.library.register_autograd("rannc::keep_rows", _gradient, setup_context=_remember, lib=_LIBRARY)
KEEP_ROWS = torch.ops.rannc.keep_rows.default
