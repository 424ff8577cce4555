"""Checks of optimizers beside a compiled model: what they may not do is an error before anything is updated,
on all ranks.

In: a context. Out: findings. The reference is one process on the global batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.runtime.job import bootstrap
from tests.distributed.contract_checks import Alone
from tests.distributed.harness.context import Context

WIDTH = 6


class SharpnessAware(torch.optim.Optimizer):
    """SAM as it is commonly written: a step to a worse point by the norm of all gradients, then the base
    optimizer's.
    """

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **others: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **others})
        self.base = base(self.param_groups, **others)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class DistanceEstimating(torch.optim.SGD):
    """As D-Adaptation and Prodigy do: one learning rate from a sum over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = sum(
            float(p.grad.abs().sum())
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        )
        for group in self.param_groups:
            group["lr"] = 1e-3 / (1.0 + total)
        super().step(closure)


def _two_steps(optimizer: SharpnessAware, again: Callable[[], Any]) -> None:
    optimizer.first_step()
    again()
    optimizer.second_step()


COUPLED: Mapping[
    str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any, Callable[[], Any]], Any]]
] = {
    "lbfgs": (
        lambda params: torch.optim.LBFGS(params, lr=0.1),
        lambda optimizer, again: optimizer.step(again),
    ),
    "sam": (
        lambda params: SharpnessAware(params, torch.optim.SGD, lr=0.1),
        lambda optimizer, again: optimizer.step(again),
    ),
    "sam_in_two_steps": (lambda params: SharpnessAware(params, torch.optim.SGD, lr=0.1), _two_steps),
    "distance": (
        lambda params: DistanceEstimating(params, lr=0.1),
        lambda optimizer, again: optimizer.step(),
    ),
}


def coupled(context: Context) -> None:
    """Refused where a rank lacks parameters, before any of them changes; right where every rank has all."""
    model, alone = context.model(), Alone(context)
    make, step = COUPLED[context.case.parameters["kind"]]
    compiled, optimizer, plain = (
        context.compile(model),
        make(model.parameters()),
        make(alone.model.parameters()),
    )
    local, batch = context.local(context.batch()), context.batch()

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = context.entry.loss_of(context.entry.call(compiled, local), local)
        loss.backward()
        return loss.detach()

    def again_alone() -> Tensor:
        plain.zero_grad()
        return alone.backward(batch)

    again()
    if context.case.num_stages > 1:
        before = {
            name: p.detach().clone() for name, p in model.named_parameters() if rannc_backend.is_held(p)
        }
        error = context.findings.raises(
            "a coupled optimizer", ("CoupledOptimizerError",), lambda: step(optimizer, again)
        )
        context.findings.that(type(optimizer).__name__ in str(error), f"it is not named in {error}")
        if context.case.parameters["kind"] != "sam_in_two_steps":  # whose first step is none of torch's
            same = all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
            context.findings.that(same, "a parameter was changed")
        return
    again_alone()
    step(optimizer, again)
    step(plain, again_alone)
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, alone.model.state_dict(), factor=1e3)


def sharding(context: Context) -> None:
    """torch's ZeroRedundancyOptimizer, made before the first call or after it: an error with the cure, and
    training goes on.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    bootstrap.start()
    model = context.model()
    compiled, local = context.compile(model), context.local(context.batch())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        optimizer.step()

    for bucketed in (False, True):  # the second is made when parameters are where their stages are
        before = {
            name: p.detach().clone() for name, p in model.named_parameters() if rannc_backend.is_held(p)
        }
        names = ("ShardingOptimizerError", *(("ReleasedParameterError",) if bucketed else ()))
        make = partial(
            ZeroRedundancyOptimizer,
            model.parameters(),
            torch.optim.SGD,
            lr=0.1,
            parameters_as_bucket_view=bucketed,
        )
        error = context.findings.raises("ZeRO", names, lambda make=make: train(make()))
        context.findings.that("What to change" in str(error), f"no cure in {error}")
        same = all(
            torch.equal(p, before[name]) for name, p in model.named_parameters() if rannc_backend.is_held(p)
        )
        context.findings.that(same, "a parameter was changed")
        train(plain)


def untried(context: Context) -> None:
    """An optimizer that cannot be copied is refused, and passes by option."""

    class Guarded(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if any(p.numel() < WIDTH for group in self.param_groups for p in group["params"]):
                raise RuntimeError("too small for me")
            super().step(closure)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(context.dtype)
    for checked in (True, False):
        net = copy.deepcopy(model)
        compiled, optimizer = (
            context.compile(net, check_optimizers=checked),
            Guarded(net.parameters(), lr=0.1),
        )
        compiled(torch.ones(4, WIDTH, dtype=context.dtype)).sum().backward()
        if checked:
            context.findings.raises("it cannot be tried", ("CoupledOptimizerError",), optimizer.step)
        else:
            optimizer.step()
        del net, compiled, optimizer


def total_norm(context: Context) -> None:
    """`get_total_norm` and clipping by it, as one process has them, for any order and for gradients of
    several modules.
    """
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    local = context.local(context.batch())
    context.entry.loss_of(context.entry.call(compiled, local), local).backward()
    alone.backward(context.batch())
    outside = nn.Parameter(torch.ones(3, dtype=context.dtype))
    outside.grad = torch.full((3,), 0.25, dtype=context.dtype)
    for order in (2.0, 1.0, float("inf")):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        expected = [p.grad for p in alone.model.parameters() if p.grad is not None]
        for extra in ((), (outside.grad,)):
            norm = torch.nn.utils.get_total_norm([*grads, *extra], order)
            reference = torch.nn.utils.get_total_norm([*expected, *extra], order)
            context.findings.close(
                "norm", f"order {order}, {len(extra)} outside", norm, reference, context.tolerance * 10
            )
    parameters = [*model.parameters(), outside]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)
    torch.nn.utils.clip_grads_with_norm_(alone.model.parameters(), 0.01, norm)
    context.compare_gradients(model, alone.gradients())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def _backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def head_outside(context: Context) -> None:
    """A head outside of the compiled backbone: an error before the first update; with `synchronize`, as in
    one process.
    """
    torch.manual_seed(context.rank)  # heads differ until they are synchronized
    backbone, head = _backbone().to(context.dtype), Head().to(context.dtype)
    model = nn.Sequential(backbone, head)
    sizes = context.case.local_rows
    synchronized = context.case.parameters["synchronized"]
    if synchronized:
        rannc_backend.synchronize(head)
    torch.manual_seed(0)
    reference = nn.Sequential(_backbone(), Head()).to(context.dtype)
    with torch.no_grad():
        for parameter, known in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(known)
    compiled = (
        context.compile(backbone, stage_starts="2")
        if context.case.num_stages > 1
        else context.compile(backbone)
    )
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(sizes), WIDTH, dtype=context.dtype, generator=generator)
        y = torch.randint(0, 2, (sum(sizes),), generator=generator)
        start, stop = context.interval
        for part in range(2):  # accumulated
            F.cross_entropy(head(compiled(x[start:stop] + part)), y[start:stop]).backward()
            outputs = reference(x + part).split(list(sizes))
            losses = [
                F.cross_entropy(own, labels)
                for own, labels in zip(outputs, y.split(list(sizes)), strict=True)
            ]
            torch.stack(losses).mean().backward()
        if not synchronized:
            before = [p.detach().clone() for p in head.parameters()]
            error = context.findings.raises(
                "a head outside", ("UnsynchronizedGradientError",), optimizer.step
            )
            context.findings.that(
                "synchronize" in str(error) and "4 parameter(s)" in str(error), f"no cure in {error}"
            )
            context.findings.that(all(map(torch.equal, head.parameters(), before)), "the head was updated")
            return
        context.compare_gradients(
            model,
            {name: p.grad for name, p in reference.named_parameters() if p.grad is not None},
            factor=10.0**step,
        )
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    context.findings.raises("twice", ("UserInputError",), lambda: rannc_backend.synchronize(head))
    context.findings.raises("the backbone", ("UserInputError",), lambda: rannc_backend.synchronize(backbone))


def plain_training(context: Context) -> None:
    """The plain model is trained on each rank's own rows where all ranks hold it: an error before the
    update.
    """
    model = _backbone().to(context.dtype)
    compiled, optimizer = context.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, dtype=context.dtype) * (1 + context.rank)
    compiled(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    error = context.findings.raises("a plain call", ("PlainGradientError",), optimizer.step)
    context.findings.that("plain call" in str(error), f"no cause in {error}")
    optimizer.zero_grad()
    # Beside a compiled backward: what all ranks have alike is right, what differs is told at the next call.
    compiled(x).sum().backward()
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
    compiled(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    error = context.findings.raises("a plain call beside", ("PlainGradientError",), lambda: compiled(x))
    context.findings.that("differ between the ranks" in str(error), f"no cause in {error}")


def state_of_optimizer(context: Context) -> None:
    """`optimizer.state_dict()` of all ranks is one process's; loaded by a new model and optimizer, training
    goes on bit for bit.
    """
    find, case = context.findings, context.case
    when, whole = case.parameters["loaded"], case.parameters["on_all_ranks"]
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model, states_on_all_ranks=whole)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone.model))

    def train(
        model: nn.Module, compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, step: int
    ) -> None:
        local = context.local(context.batch(step))
        optimizer.zero_grad()
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        optimizer.step()

    for step in range(3):
        train(model, compiled, optimizer, step)
        plain.zero_grad()
        alone.backward(context.batch(step))
        plain.step()
    weights, state, expected = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
        plain.state_dict(),
    )
    if context.rank == 0 or whole:
        find.that(state["param_groups"] == expected["param_groups"], f"groups {state['param_groups']}")
        entries = f"entries {sorted(state['state'])}, in one process {sorted(expected['state'])}"
        find.that(set(state["state"]) == set(expected["state"]), entries)
        for index, entry in expected["state"].items():
            for key, value in entry.items():
                find.close(
                    f"state {key}",
                    str(index),
                    state["state"].get(index, {}).get(key),
                    value,
                    context.tolerance * 1e4,
                )
    else:
        find.that(
            state == {"state": {}, "param_groups": []} and not weights, f"rank {context.rank} got {state}"
        )
    for step in (3, 4):
        train(model, compiled, optimizer, step)
    after = model.state_dict()

    fresh = context.model()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    again = context.compile(fresh, states_on_all_ranks=whole)
    other = torch.optim.AdamW(fresh.parameters(), lr=5e-1)
    if when == "after":
        train(fresh, again, other, 0)
    fresh.load_state_dict(weights if weights or when == "after" else fresh.state_dict())
    other.load_state_dict(state)
    for step in (3, 4):
        train(fresh, again, other, step)
    resumed = fresh.state_dict()
    for name, value in after.items():
        find.that(
            torch.equal(resumed[name], value), f"{name} is another one after training on from the saved state"
        )


def partial_states(context: Context) -> None:
    """The part of one rank, or a state of another optimizer, is refused when it is loaded, and nothing
    changes.
    """
    find = context.findings
    model = context.model()
    compiled = context.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train() -> None:
        local = context.local(context.batch())
        optimizer.zero_grad()
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        optimizer.step()

    train()
    whole = optimizer.state_dict()
    from rannc_backend.runtime.gradients.optimizer_state_dicts import raw_optimizer_states

    with raw_optimizer_states():  # as releases before this gave it
        own = optimizer.state_dict()
    find.that(len(own["state"]) < len(list(model.parameters())), "this rank has all entries")
    from_zero = own if context.rank == 0 else {}
    error = find.raises(
        "the part of rank 0", ("PartialStateError",), lambda: optimizer.load_state_dict(from_zero)
    )
    find.that("part of one rank" in str(error), f"no cause in {error}")
    find.raises("nothing", ("UserInputError",), lambda: optimizer.load_state_dict({}))
    smaller = torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict()
    find.raises("another optimizer", ("UserInputError",), lambda: optimizer.load_state_dict(smaller))
    optimizer.load_state_dict(own)  # each rank its own part: it has what it needs
    optimizer.load_state_dict(whole)
    train()
    # Before the first call: found when the model is planned.
    fresh = context.model()
    again, other = context.compile(fresh), torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    part = dict(own["state"]) if context.rank == 0 else {}
    others = _gathered(sorted(part), len(whole.get("state", part)) or len(list(model.parameters())))
    entry = next(iter(own["state"].values()))
    made = {
        i: {key: torch.zeros_like(p) if value.dim() else value.clone() for key, value in entry.items()}
        for i, p in others(fresh)
    }
    with raw_optimizer_states():
        other.load_state_dict({**own, "state": made})
    local = context.local(context.batch())
    find.raises(
        "rank 0's part on all ranks", ("PartialStateError",), lambda: context.entry.call(again, local)
    )


def _gathered(indices: list[int], number: int) -> Callable[[nn.Module], list[tuple[int, nn.Parameter]]]:
    """Rank 0's indices on all ranks, with the parameters of a model."""
    flags = torch.zeros(number, dtype=torch.long)
    flags[indices] = 1
    torch.distributed.broadcast(flags, 0)
    return lambda model: [(i, p) for i, p in enumerate(model.parameters()) if flags[i]]


def state_follows(context: Context) -> None:
    """After `undeploy` and another plan the moments are where their parameters are: training equals one
    process.
    """
    model, alone = context.model(), Alone(context)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone.model))
    plans = context.case.parameters["replicas"]
    for step, replicas in enumerate(plans):
        torch._dynamo.reset()
        compiled = context.compile(model, stage_replicas=replicas)
        local = context.local(context.batch(step))
        optimizer.zero_grad()
        plain.zero_grad()
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        alone.backward(context.batch(step))
        optimizer.step()
        plain.step()
        rannc_backend.undeploy(model)
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, alone.model.state_dict(), factor=1e4)
