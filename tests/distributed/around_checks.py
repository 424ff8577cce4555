"""Checks of what loops do around the model: copies that are compiled, values of state_dict() that replicas have too,
schedules, averages with running statistics, a layer that comes later, workers that read data.

In: a context. Out: findings. The reference is one process on the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rannc_backend
from rannc_backend.runtime.job import bootstrap
from tests.distributed.harness.context import Context
from tests.distributed.loop_checks import WIDTH, Net, compare_losses

ROWS = 12
Call = Callable[..., Any]


class Normed(nn.Module):
    """Three layers with running statistics between them, a layer that may come later, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.extra: nn.Module | None = None

    def scores(self, x: Tensor) -> Tensor:
        """[rows, 3]."""
        hidden = self.norm(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        found: Tensor = self.last(hidden)
        return found if self.extra is None else found + self.extra(hidden)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, or [rows, 3]."""
        scores = self.scores(x)
        return scores if labels is None else F.cross_entropy(scores, labels)


class Smooth(nn.Module):
    """Beside the loss, the square of the gradient by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        inputs = x.detach().requires_grad_(True)
        scores = self.last(torch.tanh(self.first(inputs)))
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return F.cross_entropy(scores, labels) + slope.pow(2).sum(1).mean()


def _rows(context: Context, number: int, *, own: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number % 3)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=context.dtype)
    labels = torch.randint(0, 3, (ROWS,), generator=generator)
    if own:
        x, labels = (value.tensor_split(context.case.world)[context.rank] for value in (x, labels))
    return x, labels


def _net(context: Context, kind: Callable[[], nn.Module] = Normed) -> Any:
    torch.manual_seed(context.case.seed)
    return kind().to(context.dtype)


def around(context: Context) -> None:
    """Each of the loops below, with the losses of one process."""
    for loop in (_groups, _rates, _plateau, _averages, _later, _smooth):
        found = []
        for own in (True, False):
            torch._dynamo.reset()
            net = _net(context, Smooth if loop is _smooth else Normed)
            found.append(loop(context, net, context.compile(net) if own else net, own))
        compare_losses(context, loop.__name__, *found)


def in_closure(context: Context) -> None:
    """Models are planned in the closure of an optimizer's first step, and gradients asked for by name."""
    for kind in (torch.optim.AdamW, torch.optim.LBFGS):
        if kind is torch.optim.LBFGS and context.case.num_stages > 1:
            context.findings.raises(
                "L-BFGS",
                ("CoupledOptimizerError",),
                lambda: _with_closures(context, torch.optim.LBFGS, own=True),
            )
            return
        found, wanted = (_with_closures(context, kind, own=own) for own in (True, False))
        compare_losses(context, kind.__name__, found, wanted)


def _with_closures(context: Context, kind: Callable[..., torch.optim.Optimizer], *, own: bool) -> list[float]:
    torch._dynamo.reset()
    net = _net(context, Smooth)
    call = context.compile(net) if own else net
    optimizer, losses = kind(net.parameters(), lr=0.01), []
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = call(*_rows(context, number, own=own))
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return losses


def by_name(context: Context) -> None:
    """Gradients of parameters that are asked for by name are an error on all ranks; others are there."""
    net = _net(context)
    call = context.compile(net)
    call(*_rows(context, 0, own=True)).backward()
    loss = call(*_rows(context, 0, own=True)) * 2
    for given in (list(net.parameters()), net.last.bias):
        found = context.findings.raises(
            "by name", ("UserInputError",), partial(torch.autograd.grad, loss, given)
        )
        context.findings.that("call backward()" in str(found), f"another error: {found}")
    inputs = list(net.parameters())
    context.findings.raises("by inputs", ("UserInputError",), lambda: loss.backward(inputs=inputs))
    scale = torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad((3 * scale).sum(), scale)
    context.findings.that(float(slope) == 3.0, f"a plain gradient is {slope}")
    _by_inputs(context)


def _by_inputs(context: Context) -> None:
    """Gradients of inputs alone leave those of parameters as they are, on all ranks; others of an earlier graph add up."""
    torch._dynamo.reset()
    net, alone = _net(context), _net(context)
    net.norm, alone.norm = nn.Identity(), nn.Identity()  # no statistics over rows
    call = context.compile(net)
    for number, keeps in enumerate((False, True, False)):
        (x, labels), (all_x, all_labels) = (_rows(context, number, own=own) for own in (True, False))
        slopes = []
        for model, given, wanted in ((call, x, labels), (alone, all_x, all_labels)):
            given = given.requires_grad_()
            loss = model(given, wanted)
            if number == 2:
                loss.backward(inputs=[given])
                slopes.append(given.grad)
            else:
                slopes += torch.autograd.grad(loss, given, retain_graph=keeps)
            if keeps:
                loss.backward()
        expected = slopes[1].tensor_split(context.case.world)[context.rank]
        error = float((slopes[0] - expected).abs().max())
        context.findings.that(error < 1e-12, f"gradients of inputs are off by {error} in step {number}")
        for name, parameter in net.named_parameters():
            found, wanted = parameter.grad, dict(alone.named_parameters())[name].grad
            if not rannc_backend.is_held(parameter):
                continue
            context.findings.that((found is None) == (wanted is None), f"{name} has {found} in step {number}")
            if found is not None and wanted is not None:
                error = float((found - wanted).abs().max())
                context.findings.that(error < 1e-12, f"{name} is off by {error} in step {number}")


def scaled(context: Context) -> None:
    """A GradScaler where a rank has no gradient, and the default dtype is not float32."""
    found = []
    default = torch.get_default_dtype()
    torch.set_default_dtype(context.dtype)
    try:
        for own in (True, False):
            net = _net(context)
            call = context.compile(net) if own else net
            optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            found.append([])
            for number in range(3):
                loss = call(*_rows(context, number, own=own))
                scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                net.zero_grad()
                found[-1] += [float(loss.detach()), scaler.get_scale()]
    finally:
        torch.set_default_dtype(default)
    compare_losses(context, "scaled", *found)


def _train(
    context: Context,
    call: Call,
    own: bool,
    optimizer: torch.optim.Optimizer,
    numbers: Iterable[int],
    after: Call = float,
) -> list[float]:
    losses = []
    for number in numbers:
        loss = call(*_rows(context, number, own=own))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        after(losses[-1])
    return losses


def _groups(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """A layer that is trained from the third step on, in a group of its own."""
    net.first.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = _train(context, call, own, optimizer, range(2))
    net.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.first.parameters()), "lr": 0.05, "weight_decay": 0.3})
    losses += _train(context, call, own, optimizer, range(2, 5))
    state = optimizer.state_dict()
    if context.rank == 0:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        context.findings.that(sizes == [6, 2] and len(state["state"]) == 8, f"state of {sizes}")
    return losses


def _rates(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """A rate and a decay for each parameter, and a warm-up."""
    groups = [
        {"params": [parameter], "lr": 0.01 * (index + 1), "weight_decay": 0.1 * (index % 2)}
        for index, parameter in enumerate(net.parameters())
    ]
    optimizer = torch.optim.Adam(groups)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return _train(context, call, own, optimizer, range(5), lambda loss: scheduler.step())


def _plateau(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """A rate that falls where the loss of all rows does not."""
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    losses = _train(context, call, own, optimizer, range(6), scheduler.step)
    return [*losses, optimizer.param_groups[0]["lr"]]


def _averages(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """SWA: its rate, its average, the average in the model, and running statistics of it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    losses = _train(context, call, own, optimizer, range(3), lambda loss: scheduler.step())
    average = swa_utils.AveragedModel(net)
    for number in range(3, 6):
        losses += _train(context, call, own, optimizer, [number], lambda loss: scheduler.step())
        average.update_parameters(net)
    net.load_state_dict(average.module.state_dict())
    batches = [_rows(context, number, own=False)[0] for number in range(3)]
    with rannc_backend.gathered(net, modifier_rank=0) if own else contextlib.nullcontext():
        swa_utils.update_bn(batches, net)
    net.eval()
    with torch.no_grad():
        return [*losses, float(call(*_rows(context, 0, own=own)))]


def _later(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """A layer that comes in mid-training."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = _train(context, call, own, optimizer, range(2))
    net.extra = nn.Linear(WIDTH, 3).to(context.dtype)
    with torch.no_grad():
        for parameter in net.extra.parameters():
            parameter.fill_(0.1)
    optimizer.add_param_group({"params": list(net.extra.parameters()), "lr": 0.05})
    if own:
        rannc_backend.synchronize(net.extra)
    return losses + _train(context, call, own, optimizer, range(2, 5))


def _smooth(context: Context, net: Any, call: Call, own: bool) -> list[float]:
    """A penalty on the gradient by the inputs, within the forward."""
    return _train(context, call, own, torch.optim.SGD(net.parameters(), lr=0.1), range(3))


def copied(context: Context) -> None:
    """A copy of a planned model is not compiled, in words; a model that is built anew takes its values."""
    net = _net(context)
    alone, call = copy.deepcopy(net), context.compile(net)
    own, whole = (_rows(context, 0, own=flag) for flag in (True, False))
    call(*own).backward()
    alone(*whole).backward()
    target = copy.deepcopy(net)
    other = _net(context)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    anew = context.compile(other)
    anew(*own)
    other.load_state_dict(target.state_dict())
    with torch.no_grad():
        losses = [float(anew(*own))], [float(alone(*whole))]
    compare_losses(context, "a model built anew", *losses)
    again = context.compile(target)
    error = context.findings.raises("a compiled copy", ("UserInputError",), lambda: again(*own))
    context.findings.that("copy of a model" in str(error), f"the error says nothing of a copy: {error}")


def values_of_replicas(context: Context) -> None:
    """What state_dict() gives on rank 0 and other ranks have too: a change in place is refused, optimizers go on beside it,
    and what is loaded counts on all ranks.
    """
    net = _net(context, Net)
    alone, call = copy.deepcopy(net), context.compile(net)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, alone))
    found, wanted = [], []
    state: dict[str, Tensor] = {}
    for number in range(3):
        found += _train(context, call, True, optimizer, [number])
        wanted += _train(context, alone, False, plain, [number])
        state = net.state_dict()
    found += _train(context, call, True, optimizer, [3])
    wanted += _train(context, alone, False, plain, [3])
    for tensors in (state, alone.state_dict()):
        for value in tensors.values():
            if value.is_floating_point():
                value.mul_(0.5)
    error = context.findings.raises(
        "a step after a change on rank 0",
        ("UserInputError", "RankFailedError"),
        lambda: call(*_rows(context, 0, own=True)),
    )
    context.findings.that("state_dict" in str(error), f"the error says nothing of state_dict: {error}")
    net.load_state_dict(state)  # over the memory of the model, on rank 0
    found += _train(context, call, True, optimizer, range(2))
    wanted += _train(context, alone, False, plain, range(2))
    compare_losses(context, "steps", found, wanted)
    average = copy.deepcopy(net)
    for mean, value in zip(average.state_dict().values(), net.state_dict().values(), strict=False):
        mean.lerp_(value + 1.0, 0.1)  # on rank 0 alone: state_dict() of the model has nothing elsewhere
    error = context.findings.raises(
        "values of one replica", ("UserInputError",), lambda: net.load_state_dict(average.state_dict())
    )
    context.findings.that("different values of" in str(error), f"the error says nothing of values: {error}")
    net.load_state_dict(average.state_dict() if context.rank == 0 else {})
    sums = [float(parameter.detach().double().sum()) for parameter in net.parameters()]
    everywhere = bootstrap.start().control.allgather(sums, what="sums of parameters")
    context.findings.that(all(each == sums for each in everywhere), f"replicas differ: {everywhere}")


def replicas_apart(context: Context) -> None:
    """A layer that each replica draws for itself is found, and rank 0's can be taken."""
    net = _net(context, Net)
    alone, call = copy.deepcopy(net), context.compile(net)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, alone))
    found = _train(context, call, True, optimizer, [0])
    wanted = _train(context, alone, False, plain, [0])
    torch.manual_seed(context.rank)
    net.last.reset_parameters()
    error = context.findings.raises(
        "a layer of each replica's own",
        ("ReplicasDifferError", "RankFailedError"),
        lambda: call(*_rows(context, 1, own=True)),
    )
    context.findings.that(
        "different values of 'last.bias'" in str(error), f"the error says nothing of it: {error}"
    )
    net.load_state_dict(net.state_dict())
    torch.manual_seed(0)
    alone.last.reset_parameters()
    found += _train(context, call, True, optimizer, range(1, 4))
    wanted += _train(context, alone, False, plain, range(1, 4))
    compare_losses(context, "steps", found, wanted)


def workers(context: Context) -> None:
    """Workers that read data beside the ranks, forked and spawned."""
    batches = [_rows(context, number, own=False) for number in range(3)]
    data = TensorDataset(*map(torch.cat, zip(*batches, strict=True)))
    sampler = DistributedSampler(data, context.case.world, context.rank, shuffle=False)
    for method in ("fork", "spawn"):
        torch._dynamo.reset()
        losses = []
        for own in (True, False):
            net = _net(context)
            call = context.compile(net) if own else net
            loader: Iterable[Any] = DataLoader(
                data,
                ROWS // context.case.world if own else ROWS,
                sampler=sampler if own else None,
                num_workers=2 if own else 0,
                multiprocessing_context=method if own else None,
            )
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            found = []
            for batch in loader:
                loss = call(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
            losses.append(found)
        compare_losses(context, method, *losses)
