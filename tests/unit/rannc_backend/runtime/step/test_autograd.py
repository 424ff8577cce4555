"""What torch.autograd.grad takes is taken on as it is, where no compiled model is part of it. And what gradients models
that follow each other give each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.step import autograd
from rannc_backend.runtime.step.autograd import call_training, watch_backwards
from rannc_backend.runtime.world import OwnRows

WAYS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "generator": lambda tensor: (each for each in [tensor]),
    "edge": get_gradient_edge,
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("of", WAYS)
@pytest.mark.parametrize("by", WAYS)
def test_gradients_of_other_models_are_torchs(of: str, by: str, create_graph: bool) -> None:
    undo = watch_backwards(lambda: [], lambda parameter: False)
    try:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(WAYS[of]((x**3).sum()), WAYS[by](x), create_graph=create_graph)
    finally:
        undo()
    assert gradient.tolist() == [3.0, 12.0] and gradient.requires_grad is create_graph


ROWS_GIVEN: deque[StorageWeakRef] = deque(maxlen=64)


@dataclass
class PlayedRuntime:
    """One rank's part of a model that multiplies its input by ``number``: it gives rows, or the global loss."""

    number: float
    gives_loss: bool = False
    num_ranks: int = 2
    averages: bool = True
    came: list[float] = field(default_factory=list)  # to its output

    def __post_init__(self) -> None:
        share = 1.0 / self.num_ranks if self.averages else 1.0
        self.inputs = [SimpleNamespace(name="x", requires_grad=True)]
        self.outputs = [SimpleNamespace(differentiable=True)]
        self.loss_index = 0 if self.gives_loss else None
        self.world: Any = SimpleNamespace(
            size=self.num_ranks, rows_given=ROWS_GIVEN, of_own_rows=WeakTensorKeyDictionary()
        )
        self.settings: Any = SimpleNamespace(share=lambda size: share, gather_inputs=True)
        self.switches: Any = SimpleNamespace(keep_graph=True)

    def begin(self, tensors: Any, training: bool) -> Any:
        return tensors

    def forward(self, tensors: Any) -> tuple[list[torch.Tensor], Any]:
        result = self.number * tensors[0].detach()
        return [result.sum() if self.gives_loss else result], SimpleNamespace(only_rows=not self.gives_loss)

    def backward(self, step: Any, grads: Any, *, keep: bool) -> list[torch.Tensor]:
        self.came.append(float(grads[0].sum()))
        return [self.number * (grads[0].expand(1) if self.gives_loss else grads[0])]

    def __call__(self, x: torch.Tensor, *averaged: torch.Tensor) -> torch.Tensor:
        (result,) = call_training(self, [x], lambda leaf: any(leaf is each for each in averaged))  # type: ignore[arg-type]
        return result


def _leaf() -> torch.Tensor:
    return torch.ones(1, requires_grad=True)


@pytest.mark.parametrize(
    ("num_ranks", "averages", "factor"), [(2, True, 2), (4, True, 4), (4, False, 1), (1, True, 1)]
)
def test_rows_get_the_global_loss_so_that_its_mean_is_its_gradient(
    num_ranks: int, averages: bool, factor: float
) -> None:
    rows = PlayedRuntime(3.0, num_ranks=num_ranks, averages=averages)
    loss, x = PlayedRuntime(5.0, gives_loss=True, num_ranks=num_ranks), _leaf()
    loss(rows(x)).backward()
    assert rows.came == [5.0 * factor]
    assert x.grad is not None and x.grad.tolist() == [15.0]  # what the user gave gets the gradient itself


def test_three_models_in_a_row() -> None:
    first, second, loss, x = (
        PlayedRuntime(2.0),
        PlayedRuntime(3.0),
        PlayedRuntime(5.0, gives_loss=True),
        _leaf(),
    )
    loss(torch.tanh(second(first(x))) * 0.0 + second(first(x))).backward()
    assert second.came == [10.0, 0.0] and first.came == [30.0, 0.0]
    assert x.grad is not None and x.grad.tolist() == [30.0]


def test_a_loss_of_own_rows_is_no_global_one() -> None:
    """Also not in a backward after one that brought a global loss to the same rows."""
    rows, loss, x = PlayedRuntime(3.0), PlayedRuntime(5.0, gives_loss=True), _leaf()
    made = rows(x)
    loss(made).backward(retain_graph=True)
    x.grad = None
    made.sum().backward()
    assert rows.came == [10.0, 1.0] and x.grad is not None and x.grad.tolist() == [3.0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_an_input_is_computed_from_is_noted_on_several_ranks(num_ranks: int) -> None:
    rows, layer, own = PlayedRuntime(3.0, num_ranks=num_ranks), torch.ones(2, 1, requires_grad=True), _leaf()
    rows((layer * own).sum(0))
    noted: dict[torch.Tensor, OwnRows] = dict(rows.world.of_own_rows)
    marks = {leaf is layer: mark.is_certain for leaf, mark in noted.items()}
    assert marks == ({True: True, False: False} if num_ranks > 1 else {})


def test_both_losses_add_up() -> None:
    rows, loss, x = PlayedRuntime(3.0), PlayedRuntime(5.0, gives_loss=True), _leaf()
    made = rows(x)
    (loss(made) + made.sum()).backward()
    assert rows.came == [11.0]


def test_a_parameter_that_is_averaged_gets_the_global_loss_too() -> None:
    loss, weight, other = PlayedRuntime(5.0, gives_loss=True), _leaf(), _leaf()
    loss(weight * 2.0, weight).backward()
    loss(other * 2.0, weight).backward()
    loss(_leaf(), weight)
    assert weight.grad is not None and weight.grad.tolist() == [20.0]
    assert other.grad is not None and other.grad.tolist() == [10.0]


def test_what_is_averaged_in_part_is_refused() -> None:
    rows, loss, weight, plain = PlayedRuntime(3.0), PlayedRuntime(5.0, gives_loss=True), _leaf(), _leaf()
    for value in (rows(_leaf()) * plain, weight * plain):
        with pytest.raises(UserInputError, match="input 'x' of a compiled model") as caught:
            loss(value, weight)
        assert "rannc_backend.synchronize(module)" in str(caught.value)
    loss(rows(_leaf()) * weight, weight).backward()
    assert rows.came == [10.0]


def test_rows_that_are_detached_between_models_are_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd.logger, "filters", [])
    caplog.set_level("INFO")
    rows, loss, x = PlayedRuntime(3.0), PlayedRuntime(5.0, gives_loss=True), _leaf()
    loss(rows(x))
    loss(_leaf())
    assert not caplog.messages
    made = rows(x)
    for _ in range(2):
        leaf = made.detach().requires_grad_()
        loss(leaf).backward()
    assert leaf.grad is not None
    (message,) = caplog.messages
    assert "pass it 2 times the gradient" in message
    made.backward(2 * leaf.grad)  # the cure
    assert x.grad is not None and x.grad.tolist() == [30.0]


class _Step(torch.autograd.Function):
    """A function of the user's, of the same name as ours, that keeps something under a name that torch's nodes have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = x.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def test_functions_of_the_users_are_passed_through() -> None:
    rows, loss = PlayedRuntime(3.0), PlayedRuntime(5.0, gives_loss=True)
    loss(_Step.apply(rows(_leaf()))).backward()
    assert rows.came == [10.0]


def _compiled() -> tuple[torch.nn.Module, Any]:
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 3)
    return model, torch.compile(model, backend="rannc", options={"stage_compiler": "eager"})


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_transforms_of_functions_are_refused(transform: Any) -> None:
    _, call = _compiled()
    with pytest.raises(UserInputError, match="within a transform of torch.func"):
        transform(lambda x: call(x).sum())(torch.randn(5, 4))


def test_batches_of_gradients_are_refused() -> None:
    _, call = _compiled()
    x = torch.randn(5, 4, requires_grad=True)
    rows = call(x)
    with pytest.raises(UserInputError, match="is_grads_batched"):
        torch.autograd.grad(rows, x, torch.ones(2, 5, 3), is_grads_batched=True)


def test_gradients_of_inputs_leave_those_of_parameters() -> None:
    model, call = _compiled()
    x = torch.randn(5, 4, requires_grad=True)
    loss = call(x).pow(2).mean()
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert model.weight.grad is None and x.grad is None
    loss.backward(inputs=[x], retain_graph=True)
    assert model.weight.grad is None and torch.equal(x.grad, slope)
    with pytest.raises(UserInputError, match="'weight' alone"):
        loss.backward(inputs=[model.weight], retain_graph=True)
    loss.backward()
    torch.testing.assert_close(
        model.weight.grad, torch.autograd.grad(model(x).pow(2).mean(), model.weight)[0]
    )
