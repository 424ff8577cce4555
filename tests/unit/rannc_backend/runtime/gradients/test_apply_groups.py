"""Steps of optimizers in parts: equal to whole steps bit by bit, seen as one step by everybody, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.errors import GroupedStepError
from rannc_backend.runtime.gradients.apply_groups import ApplyGroups, step_in_parts
from rannc_backend.runtime.torch_internals import cell_of_step, unhooked_step

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "muon": lambda params: torch.optim.Muon(params, lr=0.05),
}


class Counting(torch.optim.SGD):
    """Its rate depends on how often its step was called."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / self.calls)


class ByGroup(torch.optim.SGD):
    """Counts steps in its groups, which is the same in parts."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / group["k"])


class ByNorm(torch.optim.SGD):
    """The norm of all gradients decides."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.data.sub_(p.grad / norm)


class Above(ByGroup):
    """Calls the step of a class above."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def _parameters(which: str) -> list[Any]:
    torch.manual_seed(0)
    shapes = (
        [(4, 3), (5, 5), (2, 7), (3, 3), (6, 2)] if which == "muon" else [(4, 3), (5,), (2, 7), (1,), (6, 2)]
    )
    tensors = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return [{"params": tensors[:3]}, {"params": tensors[3:], "lr": 0.02}]


def _give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for index, p in enumerate(group["params"]):
            p.grad = torch.randn(p.shape, generator=generator) if (index + step) % 4 else None


def _flat(state: dict[str, Any]) -> list[Any]:
    return [state["param_groups"], {k: {n: v for n, v in e.items()} for k, e in state["state"].items()}]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("number", [2, 3, 20])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_steps_in_parts_are_those_of_a_whole_step_bit_by_bit(which: str, number: int) -> None:
    whole, parts = (OPTIMIZERS[which](_parameters(which)) for _ in range(2))
    groups, ids = parts.param_groups, list(map(id, parts.param_groups))
    for step in range(5):
        for each in (whole, parts):
            _give_gradients(each, step)
            each.param_groups[1]["lr"] = 0.02 / (step + 1)
        unhooked_step(type(whole))(whole)
        step_in_parts(unhooked_step(type(parts)), parts, number)
        assert parts.param_groups is groups and list(map(id, groups)) == ids
        assert _equal(_flat(whole.state_dict()), _flat(parts.state_dict()))
        assert _equal(_values(whole), _values(parts))


def _values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def test_parts_are_about_equal_and_hold_every_parameter_once() -> None:
    optimizer = torch.optim.SGD(_parameters("sgd"), lr=0.1)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    seen = []

    def step(stepped: torch.optim.Optimizer) -> None:
        seen.append([p.numel() for group in stepped.param_groups for p in group["params"]])

    step_in_parts(step, optimizer, 3)
    assert seen == [[12, 5], [14], [1, 12]]


def test_a_step_that_fails_leaves_the_groups_as_they_were() -> None:
    optimizer = torch.optim.SGD(_parameters("sgd"), lr=0.1)
    groups = optimizer.param_groups

    def step(stepped: torch.optim.Optimizer) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        step_in_parts(step, optimizer, 2)
    assert optimizer.param_groups is groups


@pytest.fixture
def in_parts() -> Iterator[Callable[[torch.optim.Optimizer, int], None]]:
    """Lets steps of an optimizer be in parts, as a compiled model with its parameters does."""
    wanted: list[tuple[Any, int]] = []

    def want(optimizer: torch.optim.Optimizer, number: int) -> None:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        wanted.append((SimpleNamespace(name_of=lambda p: "p" if id(p) in known else None), number))

    end = ApplyGroups(lambda: wanted, lambda: True).install()
    yield want
    end()


def test_hooks_schedulers_and_scalers_see_one_step(in_parts: Any) -> None:
    optimizer = torch.optim.AdamW(_parameters("sgd"), lr=0.01)
    alone = copy.deepcopy(optimizer)
    # Made before the first step in parts, as scripts do: it keeps the step that there is now.
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, alone)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    in_parts(optimizer, 3)
    calls, sizes = [], []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    inner = cell_of_step(torch.optim.AdamW)
    for step in range(4):
        for each, scaler, schedule in zip((optimizer, alone), scalers, schedules, strict=True):
            scaler.scale(torch.zeros(()))
            _give_gradients(each, step + 1)
            if step == 2:
                next(p for p in _parameters_with_gradient(each)).grad.fill_(float("inf"))
            scaler.step(each)
            scaler.update()
            schedule.step()
        sizes.append(len(calls))
        assert _equal(_values(optimizer), _values(alone)), f"step {step}"
        assert _equal(_flat(optimizer.state_dict()), _flat(alone.state_dict()))
    assert sizes == [2, 4, 4, 6], "a skipped step has no hooks"
    assert inner is not None and inner.cell_contents.__name__ == "step"


def _parameters_with_gradient(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def test_temporaries_of_foreach_steps_are_of_a_part(in_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes together is seen by the lists that torch's foreach kernels are given."""
    optimizer = torch.optim.SGD(
        [nn.Parameter(torch.zeros(10)) for _ in range(12)], lr=0.1, foreach=True, maximize=True
    )
    in_parts(optimizer, 4)
    lengths, original = [], torch._foreach_neg
    monkeypatch.setattr(
        torch, "_foreach_neg", lambda tensors: lengths.append(len(tensors)) or original(tensors)
    )
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert lengths[-4:] == [3, 3, 3, 3], "the trial on copies comes before"


def test_settings_that_a_step_changes_are_kept(in_parts: Any) -> None:
    optimizer = ByGroup(_parameters("sgd"), lr=0.1)
    alone = copy.deepcopy(optimizer)
    in_parts(optimizer, 3)
    for step in range(1, 4):
        for each in (optimizer, alone):
            _give_gradients(each, step)
            each.step()
        assert _equal(_values(optimizer), _values(alone))
        assert [group["k"] for group in optimizer.param_groups] == [step, step]


def test_an_optimizer_of_sparse_gradients_steps_in_parts(in_parts: Any) -> None:
    """On copies it is tried with sparse gradients, as it refuses others."""
    tensors = [nn.Parameter(torch.randn(6, 2)) for _ in range(3)]
    optimizer = torch.optim.SparseAdam(tensors, lr=0.01)
    alone = copy.deepcopy(optimizer)
    in_parts(optimizer, 3)
    for step in range(3):
        for each in (optimizer, alone):
            for number, p in enumerate(each.param_groups[0]["params"]):
                rows = torch.tensor([[number, step]])
                values = torch.full((2, 2), 1.0 + step)
                p.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True).coalesce()
            each.step()
        assert _equal(_values(optimizer), _values(alone))


@pytest.mark.parametrize("make", [Counting, ByNorm, torch.optim.LBFGS, Above])
def test_optimizers_that_are_not_the_same_in_parts_are_refused(make: Any, in_parts: Any) -> None:
    ByGroup(_parameters("sgd"), lr=0.1)  # torch gives the class above hooks of its own now
    parameters = [p for group in _parameters("sgd") for p in group["params"]]
    optimizer = make(parameters, lr=0.1)
    in_parts(optimizer, 2)
    before = [p.detach().clone() for p in parameters]
    _give_gradients(optimizer, 1)
    with pytest.raises(GroupedStepError, match="num_apply_group"):
        optimizer.step()
    assert _equal(before, _values(optimizer))


def test_closures_are_refused(in_parts: Any) -> None:
    optimizer = torch.optim.SGD(_parameters("sgd"), lr=0.1)
    in_parts(optimizer, 2)
    for given in (((lambda: 0.0),), {}), ((), {"closure": lambda: 0.0}):
        with pytest.raises(GroupedStepError, match="closure"):
            optimizer.step(*given[0], **given[1])
    optimizer.step(None)


def test_other_optimizers_and_later_ones_step_as_they_are() -> None:
    optimizer = torch.optim.SGD(_parameters("sgd"), lr=0.1)
    cell = cell_of_step(torch.optim.SGD)
    assert cell is not None
    before = cell.cell_contents
    end = ApplyGroups(lambda: [(SimpleNamespace(name_of=lambda p: "p"), 2)], lambda: False).install()  # type: ignore[list-item]
    _give_gradients(optimizer, 1)
    optimizer.step()
    assert cell.cell_contents is not before
    end()
    assert cell.cell_contents is before
