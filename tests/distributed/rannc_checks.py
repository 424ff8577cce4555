"""Checks of RaNNC's own surface: RaNNCModule, its methods, the functions beside it, and optimizers with from_global.

In: a context. Out: findings. Every function is collective. Terms as in contract_checks.py: *alone* is the plain model in one process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rannc_backend as pyrannc
from tests.distributed.contract_checks import Alone
from tests.distributed.harness.context import LATER_STEPS_FACTOR, Context
from tests.distributed.harness.equality import num_elements


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with hyperparameters of their own, biases and other vectors apart from matrices."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 1e-3}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=2e-3, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=2e-3, eps=1e-6, amsgrad=kind == "amsgrad")


def wrap(context: Context, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> pyrannc.RaNNCModule:
    """As a RaNNC script wraps it."""
    return pyrannc.RaNNCModule(model, optimizer, options=context.case.compile_options(), **arguments)


def loss_of(context: Context, model: Any, step: int = 0) -> torch.Tensor:
    """The loss of this rank's rows of a step."""
    batch = context.local(context.batch(step))
    return context.entry.loss_of(context.entry.call(model, batch), batch)


def compare_optimizer(context: Context, found: dict[str, Any] | None, expected: dict[str, Any], what: str) -> None:
    """Rank 0's whole optimizer state against that of one process; None elsewhere."""
    findings = context.findings
    if context.rank != 0:
        findings.that(found is None, f"{what}: this rank got {type(found).__name__}")
        return
    assert found is not None
    findings.that(found["param_groups"] == expected["param_groups"], f"{what}: groups {found['param_groups']}")
    findings.that(list(found["state"]) == sorted(expected["state"]), f"{what}: state for {list(found['state'])}")
    for index, members in expected["state"].items():
        for name, value in members.items():
            actual = found["state"].get(index, {}).get(name)
            findings.close("optimizer", f"{what} {index} {name}", actual, value, context.tolerance * LATER_STEPS_FACTOR)


def trains_as_rannc_module(context: Context) -> dict[str, Any]:
    """The common procedure of RaNNC's tests: outputs, gradients by name, steps, whole states; and the module looks like the given one."""
    case, entry, findings = context.case, context.entry, context.findings
    kind = case.parameters.get("optimizer", "adam")
    given, alone = context.model(), Alone(context)
    optimizer, expected = make_optimizer(kind, given), make_optimizer(kind, alone.model)
    names = [name for name, _ in given.named_parameters()]
    model = wrap(context, given, optimizer)
    findings.that(isinstance(model, nn.Module) and model.model is given, "it is no module, or another")
    findings.that([name for name, _ in model.named_parameters()] == names, "names before the first call")
    findings.that(not model.ready and list(model.state_dict()) == list(given.state_dict()), "state_dict before the first call")
    for step in range(case.num_steps):
        optimizer.zero_grad()
        expected.zero_grad()
        factor = 1.0 if step == 0 else LATER_STEPS_FACTOR
        outputs = entry.call(model, context.local(context.batch(step)))
        loss = entry.loss_of(outputs, context.local(context.batch(step)))
        loss.backward()
        plain, plain_loss = alone.loss(context.batch(step))
        plain_loss.backward()
        context.compare_rows(outputs, entry.rows_of(plain), factor=factor)
        if entry.loss_inside:
            findings.close("loss", f"step {step}", loss, plain_loss, context.tolerance * factor)
        for name, gradient in alone.gradients().items():
            findings.close("gradient", name, model.get_param_grad(name), gradient, context.tolerance * factor * 10)
        norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.05)
        findings.close("norm", f"step {step}", torch.tensor(model._calc_grad_norm(), dtype=norm.dtype), norm, context.tolerance * factor)
        findings.close("norm", f"clipped {step}", model.clip_grad_norm(0.05).to(norm.dtype), norm, context.tolerance * factor)
        optimizer.step()
        expected.step()
    for name, parameter in alone.model.named_parameters(remove_duplicate=False):
        findings.close("parameter", name, model.get_param(name), parameter, context.tolerance * LATER_STEPS_FACTOR)
    _states(context, model, alone.model)
    compare_optimizer(context, optimizer.state_dict(from_global=True), expected.state_dict(), "after training")
    here = [name for name, _ in model.named_parameters()]
    findings.that([name for name, _ in model.named_parameters(from_global=True)] == names, "names of all parameters")
    findings.that(len(list(model.parameters())) == len(here), "parameters() and named_parameters() differ")
    findings.raises("an unknown name", ("UserInputError",), lambda: pyrannc.get_param(model, "ghost"))
    return {"owned": here, "names": names}


def _states(context: Context, model: pyrannc.RaNNCModule, plain: nn.Module) -> None:
    findings = context.findings
    for arguments in ({}, {"no_hook": True}, {"rank0_only": False}, {"no_hook": True, "rank0_only": False}, {"sync_all_ranks": True}):
        state = model.state_dict(**arguments)
        everywhere = "rank0_only" in arguments or "sync_all_ranks" in arguments
        if context.rank == 0 or everywhere:
            context.compare_state(state, dict(plain.state_dict()), factor=LATER_STEPS_FACTOR)
        else:
            findings.that(not state, f"state_dict({arguments}) gives this rank {list(state)}")
        if arguments == {}:
            fresh = context.model()
            if context.rank == 0:
                fresh.load_state_dict(copy.deepcopy(state))


def optimizer_state_goes_round(context: Context) -> None:
    """Whole optimizer state loaded into a new job's optimizer, before its first call and after, given by all ranks or by rank 0 only."""
    kind = context.case.parameters["optimizer"]
    alone = Alone(context)
    expected = make_optimizer(kind, alone.model)
    first = context.model()
    optimizer = make_optimizer(kind, first)
    model = wrap(context, first, optimizer)
    for step in range(2):
        _step(context, model, optimizer, alone, expected, step)
    for group in (*optimizer.param_groups, *expected.param_groups):
        group["lr"] *= 0.5
    whole = optimizer.state_dict(from_global=True)
    weights = model.state_dict(rank0_only=False)
    compare_optimizer(context, whole, expected.state_dict(), "saved")
    shared = Path(context.directory) / f"{context.case.name}.pt"
    if context.rank == 0:
        torch.save(whole, shared)
    pyrannc.barrier()
    given_by_all = torch.load(shared)
    for moment in ("before", "after"):
        for giver, state in (("all ranks", given_by_all), ("rank 0", whole)):
            what = f"loaded {moment} the first call by {giver}"
            again = context.model()
            fresh = make_optimizer(kind, again)
            loaded = wrap(context, again, fresh)
            loaded.load_state_dict(copy.deepcopy(weights))
            if moment == "after":
                loss_of(context, loaded, 7).backward()
                fresh.zero_grad()
            fresh.load_state_dict(copy.deepcopy(state), from_global=True)
            if moment == "before":
                loss_of(context, loaded, 7).backward()
                fresh.zero_grad()
            compare_optimizer(context, fresh.state_dict(from_global=True), expected.state_dict(), what)
            other, other_expected = copy.deepcopy(alone.model), None
            other_expected = make_optimizer(kind, other)
            other_expected.load_state_dict(copy.deepcopy(expected.state_dict()))
            twin = Alone(context)
            twin.model = other
            _step(context, loaded, fresh, twin, other_expected, 3)
            for name, value in other.named_parameters():
                context.findings.close("parameter", f"{name}, {what}", loaded.get_param(name), value, context.tolerance * 1e3)
            held = {id(p) for p in fresh.state if num_elements(fresh.state[p])}
            context.findings.that(held <= {id(p) for p in loaded.parameters()}, f"{what}: state of other ranks' parameters is kept")
    context.findings.that(
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict, "the optimizer's class was changed"
    )


def _step(
    context: Context, model: Any, optimizer: torch.optim.Optimizer, alone: Alone, expected: torch.optim.Optimizer, step: int
) -> None:
    optimizer.zero_grad()
    expected.zero_grad()
    loss_of(context, model, step).backward()
    alone.backward(context.batch(step))
    optimizer.step()
    expected.step()
