"""Attributes that a forward writes and does not read have their values after each call, as in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.capture.nonstrict.reachable import Reachable
from rannc_backend.capture.nonstrict.swapping import attributes_of
from rannc_backend.errors import ModelError, UnsupportedModelError
from tests.changing_models import Reporting
from tests.default_dtype import float64
from tests.nonstrict_models import LOCK, WIDTH, Ends, batch


def _compiled(model: nn.Module, **options: object) -> Any:
    torch._dynamo.reset()
    options = {"stage_compiler": "eager", **options}
    return torch.compile(model, backend="rannc", options=options)


@pytest.mark.parametrize("capture", ["auto", "nonstrict"])
def test_they_have_the_values_of_each_call(capture: str) -> None:
    with float64():
        model = Reporting()
        alone, compiled = copy.deepcopy(model), _compiled(model, capture=capture)
        for rows in (4, 4, 6):
            for each in (model, alone):
                each.zero_grad()
            x = batch(rows, rows)
            for call, each in ((compiled, model), (alone, alone)):
                (call(x) + each.penalty).backward()
            assert model.share == alone.share and model.report["norm"] == pytest.approx(alone.report["norm"])
            for name in ("hidden", "penalty"):
                torch.testing.assert_close(getattr(model, name), getattr(alone, name), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(model.first.seen, alone.first.seen, rtol=1e-13, atol=1e-13)
            assert model.num_rows == alone.num_rows == rows
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_they_end_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with float64():
        model = Reporting()
        capture = capture_call(model, call_of(model, (batch(4),), {}))
        model.share, model.hidden, model.report = 0.75, torch.zeros(3), None
        assert capture.serves(call_of(model, (batch(5),), {})) == ""
        model.scale = 3.0
        assert capture.serves(call_of(model, (batch(5),), {})) == "the model.scale"


class _Reading(Reporting):
    """Reads what it has written in the call before, by its name or by one that it makes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, self.name)


def test_a_name_that_is_made_while_it_runs_is_refused() -> None:
    model = _Reading("".join(("sha", "re")))
    model.share = 2.0
    with pytest.raises(ModelError):
        capture_call(model, call_of(model, (batch(4).float(),), {}))
    assert model.share == 2.0


class _Keeping(nn.Linear):
    """Puts something there that no later call can make."""

    def __init__(self, what: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            y = super().forward(x)
        if self.what == "parameter":
            self.kept = self.weight
        else:
            self.kept = {"hook": lambda: y, "value": y}
        return y.pow(2).mean()


@pytest.mark.parametrize("what", ["parameter", "function"])
def test_what_no_graph_gives_is_refused(what: str) -> None:
    model = _Keeping(what)
    with pytest.raises(UnsupportedModelError, match="changes the model.kept"):
        capture_call(model, call_of(model, (batch(4).float(),), {}))
    assert not hasattr(model, "kept")


class _Names(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.both = x
        self.only, self.added, self.by_string = x, 1, x
        self.added += 1
        return self.both + torch.zeros(len("by_string"))[0]


class _Strings(_Names):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + getattr(self, str(x.dim()), 0)


def test_names_that_are_only_written() -> None:
    names = {"both", "only", "added", "by_string", "other", "training"}
    assert Reachable(_Names()).only_written(names) == {"only", "by_string"}
    assert Reachable(_Strings()).only_written(names) == {"only"}


def test_code_of_torch_reads_what_its_layers_hold() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    found = [name for _, _, name in attributes_of(model, {"p", "seen"})]
    assert found == ["the model.p", "the model.seen", "0.seen", "1.p", "1.seen"]


class _Listing(Ends):
    """Notes something in each forward, and does a thing once."""

    def __init__(self, *, notes: bool) -> None:
        super().__init__()
        self.notes, self.seen, self.to_do = notes, [0], [1, 2]

    def middle(self, x: Tensor) -> Tensor:
        if self.notes:
            self.seen.append(len(self.seen))
        elif self.to_do:
            self.to_do.pop()
        return x.sin()


def test_lists_that_become_longer_are_refused_and_shorter_ones_settle() -> None:
    noting, settling = _Listing(notes=True), _Listing(notes=False)
    with pytest.raises(ModelError, match="changes the model.seen"):
        capture_call(noting, call_of(noting, (batch(4),), {}))
    assert noting.seen == [0]
    capture_call(settling, call_of(settling, (batch(4),), {}))
    assert settling.to_do == []
