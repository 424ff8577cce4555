"""Values that code decides by are those of the batch of all ranks, computed from each rank's part."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rannc_backend.capture.nonstrict.arguments import Ranks, call_of
from rannc_backend.capture.nonstrict.captures import Capture, capture_call, find_capture
from rannc_backend.capture.nonstrict.kept_modules import WHOLE_MODEL
from rannc_backend.capture.nonstrict.read_values import ReadValue
from rannc_backend.capture.nonstrict.reads import Decision
from rannc_backend.errors import UnsupportedModelError
from tests.nonstrict_models import graph_arguments

VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all": lambda x, m: m.all(),
    "any over tokens first": lambda x, m: (m.any(1) & (x > 0).all(1).any()).all(),
    "largest": lambda x, m: x.amax() > 1,
    "least": lambda x, m: x.min() > -1,
    "count": lambda x, m: m.sum() > 4,
    "sum": lambda x, m: x.sum() > 0,
    "mean": lambda x, m: x.mean() > x.mean(0).max() - 1,
    "every element": lambda x, m: m.sum() == m.numel(),
    "first row": lambda x, m: x[0, 0] > 0,
    "order of rows": lambda x, m: x[:, 0].argmax() > 2,
    "rows in the second dimension": lambda x, m: (x.t().cumsum(1)[:, -1] > 0).any(),
    "tokens of rows": lambda x, m: x.reshape(-1).gather(0, m.reshape(-1).long().argmin()[None])[0] > 0,
    "numbers of rows": lambda x, m: (torch.arange(x.shape[0]) * m[:, 0]).max() > 2,
    "parts of rows": lambda x, m: (x.tanh().split([1, 2], 1)[1] > 0).all(1).any(),
    "the largest of each row": lambda x, m: (x * 2).max(1)[0].min() > 0,
    "parts of the batch": lambda x, m: (torch.cat(x.unsqueeze(1).chunk(3, 2), 1).sum(1) > 1).any(),
    "what all share": lambda x, m: torch.triu(torch.ones(3, 3)).sum() > 5,
}


class Deciding(nn.Module):
    """Decides by a value of its inputs."""

    def __init__(self, value: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.value = value

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.layer(x if self.value(x, m) else 2 * x).sum()


class _Stop(Exception):
    pass


def over_ranks(value: ReadValue, parts: Sequence[Sequence[Tensor]], others: Sequence[Tensor]) -> list[Any]:
    """What each rank finds: `parts`: the call's tensors of each; payloads travel as text."""
    payloads: list[Any] = []

    def send(payload: Any) -> list[Any]:
        payloads.append(json.loads(json.dumps(payload)))
        raise _Stop

    for part in parts:
        try:
            return [value.evaluate([*others, *part], send)] * len(parts)  # without inputs
        except _Stop:
            pass
    return [value.evaluate([*others, *part], lambda _: copy.deepcopy(payloads)) for part in parts]


def batch(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64)
    return x, torch.rand(num_rows, 3, generator=generator) > 0.2


def _capture(model: nn.Module, values: Sequence[Tensor], ranks: Ranks | None = None) -> Capture:
    return capture_call(model, call_of(model, values, {}), ranks or Ranks())


def _decision(model: nn.Module, values: Sequence[Tensor]) -> Decision | None:
    decisions = _capture(model, values).recorded.decisions
    return decisions[0] if decisions else None


@pytest.mark.parametrize("name", VALUES)
def test_ranks_find_what_one_process_reads(name: str) -> None:
    model = Deciding(VALUES[name])
    decision = _decision(model, batch(5, 0))
    if name == "what all share":
        assert decision is None  # nothing to ask for
        return
    assert decision is not None
    (value,) = decision.values
    others = [*model.parameters()]

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 99))
    def holds(rows: list[int], seed: int) -> None:
        whole = batch(sum(rows), seed)
        parts = list(zip(*(tensor.split(rows) for tensor in whole), strict=True))
        expected = bool(VALUES[name](*whole))
        assert [bool(found) for found in over_ranks(value, parts, others)] == [expected] * len(rows)

    holds()


@pytest.mark.parametrize(
    ("name", "numbers"), [("all", 1), ("largest", 1), ("count", 1), ("order of rows", 5)]
)
def test_no_more_travels_than_the_rest_needs(name: str, numbers: int) -> None:
    sent: list[Any] = []
    decision = _decision(Deciding(VALUES[name]), batch(5, 0))
    assert decision is not None
    (value,) = decision.values
    value.evaluate([None, None, *batch(5, 0)], lambda payload: sent.append(payload) or [payload])
    assert sum(len(found) for _, found in sent[0]["values"].values()) == numbers


def test_another_answer_is_another_capture_and_the_first_one_comes_back() -> None:
    model = Deciding(VALUES["all"])
    x, _ = batch(4, 0)
    full, holes = torch.ones(4, 3, dtype=torch.bool), torch.eye(4, 3, dtype=torch.bool)
    captures = [_capture(model, (x, full))]
    assert find_capture(captures, call_of(model, (x, holes), {})) is None
    captures.append(_capture(model, (x, holes)))
    for mask, expected in ((full, captures[0]), (holes, captures[1])):
        call = call_of(model, (x, mask), {})
        found = find_capture(captures, call)
        assert found is expected
        graph = found.recorded.captured.graph_module
        torch.testing.assert_close(graph(*graph_arguments(found, call))[0], model(x, mask))


def test_another_ranks_rows_decide() -> None:
    """All of this rank's mask is set, and another's is not."""
    model = Deciding(VALUES["all"])
    x, mask = batch(4, 0)[0], torch.ones(4, 3, dtype=torch.bool)
    alone = _capture(model, (x, mask))

    def with_another(payload: Any) -> list[Any]:
        other = copy.deepcopy(payload)
        for _, numbers in other["values"].values():
            numbers[:] = [False] * len(numbers)
        return [payload, other]

    call = call_of(model, (x, mask), {})
    assert find_capture([alone], call, Ranks(exchange=with_another)) is None
    other = _capture(model, (x, mask), Ranks(exchange=with_another))
    assert [decision.answer for decision in other.recorded.decisions] == [False]


class OfBuffers(Deciding):
    """Decides by a buffer and by a parameter."""

    def __init__(self) -> None:
        super().__init__(VALUES["all"])
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        x = x if self.ready else 2 * x
        return self.layer(x).sum() * (1 if self.layer.bias[0].item() > 10 else 2)


def test_buffers_and_parameters_are_read_where_they_are() -> None:
    model = OfBuffers()
    values = batch(4, 0)
    capture = _capture(model, values)
    assert [decision.answer for decision in capture.recorded.decisions] == [False, False]
    call = call_of(model, values, {})

    def of_another_rank(payload: Any) -> list[Any]:
        return [payload, [True]]

    absent = Ranks(is_absent=lambda tensor: tensor is model.ready, exchange=of_another_rank)
    assert find_capture([capture], call) is capture
    assert find_capture([capture], call, absent) is None
    with pytest.raises(UnsupportedModelError, match="no rank has all of"):
        find_capture([capture], call, Ranks(is_absent=lambda tensor: tensor is model.ready))
    model.ready.fill_(True)
    assert find_capture([capture], call) is None


def test_only_the_models_own_tests_are_decisions() -> None:
    """Passes look at the values of constants, which are part of the value here."""
    model = Deciding(lambda x, m: (m.sum() + torch.tensor([3, 3])).max().item() > 4)
    capture = _capture(model, batch(4, 0))
    assert len(capture.recorded.decisions) == 1
    assert capture.recorded.decisions[0].location.startswith(__file__)


class Numbers(nn.Module):
    """Uses numbers of its inputs in the ways that code does."""

    def __init__(self, of_floats: bool = False) -> None:
        super().__init__()
        self.layer, self.of_floats = nn.Linear(3, 2, dtype=torch.float64), of_floats

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        x = x[:, : int(lengths.max())].sum(1) if longest < 9 else x.sum(1)
        x = x * 2 if torch.equal(lengths, lengths.clone()) else x
        for number in range(lengths.min()):
            x = x + number
        if self.of_floats:
            x = x / float(x.max())
        return self.layer(x).sum()


def test_whole_numbers_are_part_of_what_a_capture_holds_for() -> None:
    model = Numbers()
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    captures = [_capture(model, (x, torch.tensor([2, 3, 2])))]
    graph = captures[0].recorded.captured.graph_module
    for lengths, serves in (([3, 2, 2], True), ([2, 4, 2], False), ([3, 3, 1], False)):
        call = call_of(model, (x, torch.tensor(lengths)), {})
        assert (find_capture(captures, call) is not None) == serves
        if serves:
            torch.testing.assert_close(
                graph(*graph_arguments(captures[0], call))[0], model(x, torch.tensor(lengths))
            )


class OfBoth(Deciding):
    """A value that both a parameter and the batch are part of."""

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden.sum() if hidden.max() > 0 else 2 * hidden.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Numbers(of_floats=True), "used as one"),
        (Deciding(lambda x, m: torch.rand(()) > 0.5), "random numbers"),
        (Deciding(lambda x, m: (x + torch.rand(3)).sum() > 0), "random numbers"),
        (OfBoth(VALUES["all"]), "parameters or buffers are part of beside the batch"),
        (Deciding(lambda x, m: x[:, 0].argmax() > 2), "70000 numbers of this rank's rows"),
    ],
)
def test_what_ranks_cannot_agree_on_beforehand_runs_as_written(model: nn.Module, reason: str) -> None:
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    values = (x, torch.tensor([2, 3, 2])) if isinstance(model, Numbers) else batch(4, 0)
    if "70000" in reason:
        x = torch.zeros(70_000, 3, dtype=torch.float64)
        values = (x, x > 0)
    recorded = _capture(model, values).recorded
    assert list(recorded.kept_modules) == [WHOLE_MODEL] and reason in recorded.why_kept
    assert not recorded.decisions


class Refusing(Deciding):
    """Raises for a value of its inputs."""

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        if self.value(x, m):
            raise ValueError("not such an input")
        return self.layer(x).sum()


def test_a_value_that_is_read_to_raise_decides_nothing() -> None:
    """What the other way would do is found by a run without a graph."""
    values = (torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.bool))
    recorded = _capture(Refusing(VALUES["order of rows"]), values).recorded
    assert not recorded.decisions and len(recorded.unchecked) == 1
