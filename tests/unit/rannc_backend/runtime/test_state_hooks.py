"""Hooks of modules whose parameters are spread over ranks: who writes in `save_pretrained`."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.runtime import state_hooks
from rannc_backend.runtime.state_hooks import GivenCopies, SavedByZero


class Saving(nn.Module):
    """Notes who was told to write."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, bool]] = []

    def save_pretrained(
        self, directory: str, is_main_process: bool = True, state_dict: dict[str, Any] | None = None
    ) -> str:
        self.told.append((directory, is_main_process))
        return directory


class ForItself(nn.Module):
    def save_pretrained(self, directory: str) -> None:
        raise AssertionError("it would write on every rank")


class Rank:
    """A rank that is not alone, with nobody to talk to."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks have agreed upon."""
    found: list[str] = []
    monkeypatch.setattr(state_hooks, "agree", lambda world, what: found.append(what))
    monkeypatch.setattr(state_hooks, "failing_together", lambda world, what: contextlib.nullcontext())
    return found


def test_rank_0_writes_and_all_wait_for_it(agreed: list[str]) -> None:
    for rank, expected in ((0, [("a", True), ("a", False)]), (1, [("a", False), ("a", False)])):
        module = Saving()
        save = SavedByZero(module, Rank(rank), bool)  # type: ignore[arg-type]
        assert save("a") == "a"
        save("a", is_main_process=False)
        assert module.told == expected
    assert agreed == ["the end of save_pretrained"] * 4


def test_a_rank_that_has_the_state_or_the_whole_model_writes_alone(agreed: list[str]) -> None:
    module = Saving()
    SavedByZero(module, Rank(1), bool)("a", state_dict={"x": 1})  # type: ignore[arg-type]
    SavedByZero(module, Rank(1), lambda: True)("a")  # type: ignore[arg-type]
    module.save_pretrained = SavedByZero(module, Rank(1), bool)  # type: ignore[method-assign,assignment,arg-type]
    twin = copy.deepcopy(module)
    twin.save_pretrained("b")
    assert module.told == [("a", True), ("a", True)] and agreed == []
    assert twin.told[-1] == ("b", True)


def test_what_cannot_be_told_who_writes_is_refused(agreed: list[str]) -> None:
    module = ForItself()
    with pytest.raises(UnsupportedModelError, match="does not let one rank write"):
        SavedByZero(module, Rank(1), bool)("a")  # type: ignore[arg-type]


def test_copies_that_were_changed_in_place_are_named_once() -> None:
    given, values = GivenCopies(), [torch.ones(3), torch.ones(3)]
    for number, value in enumerate(values):
        given.note(number, f"layer{number}.weight", value)
    with torch.inference_mode():
        given.note("inference", "cached", torch.ones(2))
    assert given.changed() == []
    given.check([[], []])
    values[1].mul_(0.5)
    assert given.changed() == ["layer1.weight"] and values[1].tolist() == [0.5] * 3
    given.note(0, "layer0.weight", torch.zeros(3))
    with pytest.raises(UserInputError, match=r"changed in place \(layer1.weight\)"):
        given.check([[], given.changed()])
    assert given.changed() == []


def test_copies_that_were_given_take_no_memory() -> None:
    given, value = GivenCopies(), torch.ones(1000)
    given.note(0, "weight", value)
    ((_, counter, _),) = given._given.values()
    assert counter.untyped_storage().nbytes() == 0 and value.sum() == 1000


def test_copies_that_are_loaded_may_have_been_changed() -> None:
    given, value = GivenCopies(), torch.ones(3)
    given.note(0, "weight", value)
    value.mul_(0.5)
    given.loaded(0, [False, False])
    assert given.changed() == ["weight"]
    given.loaded(0, [False, True])
    assert given.changed() == []
