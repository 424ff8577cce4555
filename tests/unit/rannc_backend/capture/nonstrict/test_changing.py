"""A forward that changes tensors of its model, in each way that Python has: the model is that of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.inputs import named_tensors
from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.errors import UnsupportedModelError
from tests.changing_models import (
    FILLED,
    HIDDEN,
    LATE,
    MODELS,
    TRAINED,
    UNCHANGED,
    WAYS,
    Adversarial,
    LateChange,
    Momentum,
    Prototypes,
    Quantized,
    batch,
)
from tests.default_dtype import float64
from tests.masked_models import WRITTEN, WRITTEN_IN_BOTH, Masked

CAPTURES = ("dynamo", "nonstrict", "as written")


def _check(model: nn.Module, **options: object) -> None:
    """Two steps and an evaluation, without an optimizer."""
    torch._dynamo.reset()
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="rannc", options={"stage_compiler": "eager", **options})
    for step in range(3):
        rows = batch(6, step)
        with torch.set_grad_enabled(step < 2):
            result, expected = compiled(rows), alone(rows)
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
        if step < 2:
            model.zero_grad()
            alone.zero_grad()
            result.backward()
            expected.backward()
        theirs = named_tensors(alone)
        for name, mine in named_tensors(model).items():
            torch.testing.assert_close(mine, theirs[name], rtol=1e-13, atol=1e-13, msg=f"{name}, step {step}")
            if mine.requires_grad:
                torch.testing.assert_close(mine.grad, theirs[name].grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
def test_models_as_people_write_them(name: str) -> None:
    with float64():
        _check(MODELS[name]())


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_written_into_a_detached_tensor_has_its_gradient_there(way: str, capture: str) -> None:
    with float64():
        _check(Masked(WRITTEN[way]), capture=capture)


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
@pytest.mark.parametrize("way", WRITTEN_IN_BOTH)
def test_what_differs_in_two_places_is_not_silently_one(way: str, capture: str) -> None:
    with float64():
        model = Masked(WRITTEN_IN_BOTH[way])
        if capture == "nonstrict":
            _check(model, capture=capture)
            return
        options = {"stage_compiler": "eager", "capture": capture}
        with pytest.raises(UnsupportedModelError, match="gradient") as found:
            torch.compile(model, backend="rannc", options=options)(batch(6))
        assert "masked_models.py" in found.value.location


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
@pytest.mark.parametrize("way", FILLED)
def test_what_is_written_without_its_gradient_has_none(way: str, capture: str) -> None:
    with float64():
        _check(Quantized(FILLED[way]), capture=capture)


@pytest.mark.parametrize("way", HIDDEN)
def test_what_changes_values_behind_their_gradient_runs_as_written(way: str) -> None:
    with float64():
        _check(Quantized(HIDDEN[way]))


@pytest.mark.parametrize("way", sorted(HIDDEN.keys() - {"new data", "part"}))
def test_what_changes_values_behind_their_gradient_is_no_graph(way: str) -> None:
    """Dynamo itself refuses the others."""
    compiled = torch.compile(
        Quantized(HIDDEN[way]), backend="rannc", options={"stage_compiler": "eager", "capture": "dynamo"}
    )
    with pytest.raises(UnsupportedModelError, match="gradient") as found:
        compiled(batch(6).float())
    assert "changing_models.py" in found.value.location


def _share(key: Tensor, query: Tensor) -> None:
    key.data = query.data


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
def test_two_tensors_that_become_one_are_refused(capture: str) -> None:
    compiled = torch.compile(
        Momentum(_share), backend="rannc", options={"stage_compiler": "eager", "capture": capture}
    )
    with pytest.raises(UnsupportedModelError, match="share the memory of another one"):
        compiled(batch(6).float())


def test_two_tensors_that_become_one_in_code_that_runs_as_written_are_refused() -> None:
    model = Momentum(_share, decides=True)
    with pytest.raises(UnsupportedModelError):
        capture_call(model, call_of(model, (batch(6).float(),), {}))


class _Renewed(Momentum):
    """Puts a new parameter in place of one that is trained, before it is used or after."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(lambda key, query: None)
        self.is_first = first

    def forward(self, x: Tensor) -> Tensor:
        loss = None if self.is_first else super().forward(x)
        self.query.weight = nn.Parameter(self.query.weight * 0.5)
        return super().forward(x) if loss is None else loss


@pytest.mark.parametrize("first", [False, True])
def test_a_new_parameter_in_place_of_a_trained_one_is_refused(first: bool) -> None:
    model = _Renewed(first=first)
    with pytest.raises(
        UnsupportedModelError, match="new parameter in place of query.weight, which is trained"
    ):
        capture_call(model, call_of(model, (batch(6).float(),), {}))


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
@pytest.mark.parametrize("way", TRAINED)
def test_a_trained_parameter_that_the_forward_changes_has_its_gradient(way: str, capture: str) -> None:
    """A graph has the change in between, at which it would end."""
    with float64():
        _check(Prototypes(TRAINED[way]), capture=capture)


@pytest.mark.parametrize("way", LATE)
def test_a_trained_parameter_may_be_changed_behind_its_use(way: str) -> None:
    with float64():
        _check(LateChange(LATE[way]))


class _Unseen(nn.Linear):
    """Changes its weight by a function of torch that looks like no change."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(self.weight, 1.0, out=self.weight)
        return super().forward(x).pow(2).mean()


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
def test_an_unseen_change_of_a_trained_parameter_is_refused(capture: str) -> None:
    model = torch.compile(
        _Unseen(6, 6), backend="rannc", options={"stage_compiler": "eager", "capture": capture}
    )
    with pytest.raises(UnsupportedModelError, match="by an operator that writes into its operands"):
        model(batch(6).float())


@pytest.mark.parametrize("capture", ["dynamo", "nonstrict"])
def test_a_view_from_before_a_trained_parameter_is_changed_is_refused(capture: str) -> None:
    options = {"stage_compiler": "eager", "capture": capture}
    model = Prototypes(TRAINED["clamp"], view_first=True)
    with pytest.raises(UnsupportedModelError, match="by way of x.data"):
        torch.compile(model, backend="rannc", options=options)(batch(6).float())


@pytest.mark.parametrize("way", UNCHANGED)
def test_a_parameter_whose_data_are_set_to_its_own_is_trained(way: str) -> None:
    with float64():
        _check(Prototypes(UNCHANGED[way]))


def test_what_replaces_the_change_of_a_trained_parameter_works() -> None:
    """As the error says."""

    class Straight(Prototypes):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.rows + (self.rows.clamp(-0.3, 0.3) - self.rows).detach()
            return (self.first(x) @ rows.t()).pow(2).mean()

    with float64():
        _check(Straight(TRAINED["clamp"]))


class _Given(torch.autograd.Function):
    """One that no operator can hold: it is given a module."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3.0, None


class _Deciding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)
        rows = rows * 3.0 if float(rows.sum()) > 0.0 else rows * 0.5
        return _Given.apply(rows, self).pow(2).mean()


@pytest.mark.parametrize("capture", ["auto", "nonstrict"])
def test_a_function_of_code_that_runs_as_written_may_be_given_anything(capture: str) -> None:
    with float64():
        torch.manual_seed(0)
        _check(_Deciding(batch(2).shape[1], 3), capture=capture)


def test_len_of_a_tensor_is_its_batch_size() -> None:
    """So that the model has a graph, and need not run as written."""
    model = Adversarial()
    capture = capture_call(model, call_of(model, (batch(6).float(),), {}))
    assert not capture.recorded.kept_modules
    assert len([1, 2]) == 2 and len(torch.ones(3, 2)) == 3


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_that_of_one_process(way: str, capture: str) -> None:
    _check_way(way, capture, is_buffer=False)


@pytest.mark.parametrize(("way", "capture"), zip(WAYS, itertools.cycle(CAPTURES)))
def test_each_way_of_changing_a_buffer_is_that_of_one_process(way: str, capture: str) -> None:
    _check_way(way, capture, is_buffer=True)


def _check_way(way: str, capture: str, *, is_buffer: bool) -> None:
    decides = capture == "as written"
    with float64():
        model = Momentum(WAYS[way], is_buffer=is_buffer, decides=decides)
        _check(model, capture="auto" if decides else capture)
