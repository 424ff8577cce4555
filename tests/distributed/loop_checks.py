"""Checks of the loops that people run: Lightning's Trainer, and what loops do around the model.

In: a context. Out: findings. The reference is one process on the batches of all ranks.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from tests.distributed.conformance_checks import run_example
from tests.distributed.harness.context import Context

WIDTH = 6
#: Rounding passes through the optimizer and Lightning's means of numbers.
TOLERANCE = 1e-10


class Net(nn.Module):
    """Three layers, with the loss inside where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        scores = self.last(hidden)
        return scores if labels is None else F.cross_entropy(scores, labels)


def _net(context: Context) -> Net:
    torch.manual_seed(context.case.seed)
    return Net().to(context.dtype)


def _rows(context: Context, number: int) -> tuple[Tensor, Tensor]:
    """The rows of one batch of all ranks: four for each."""
    generator = torch.Generator().manual_seed(number)
    count = 4 * context.case.world
    x = torch.randn(count, WIDTH, generator=generator, dtype=context.dtype)
    return x, torch.randint(0, 3, (count,), generator=generator)


def _own(context: Context, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, labels = (value.chunk(context.case.world)[context.rank] for value in rows)
    return x, labels


def compare_losses(context: Context, what: str, found: Sequence[float], wanted: Sequence[float]) -> None:
    context.findings.that(
        len(found) == len(wanted)
        and all(abs(one - two) <= TOLERANCE * abs(two) for one, two in zip(found, wanted, strict=True)),
        f"{what}: {found} instead of {wanted}",
    )


def lightning(context: Context) -> None:
    """The example for Lightning: training, accumulation, clipping, validation, a checkpoint, and resuming in one
    process, with the losses of Lightning alone.
    """
    path = context.directory / f"{context.case.name}.ckpt"
    found = run_example(context, "--save", str(path))
    wanted = run_example(context, "--plain")
    compare_losses(context, "training", found, wanted)
    rannc_backend.barrier()
    further = ("--resume", str(path), "--epochs", "2")
    compare_losses(
        context, "resumed", run_example(context, *further), run_example(context, "--plain", *further)
    )


def joined(context: Context) -> None:
    """Ranks with unequal numbers of batches, one without any: those without rows take part, and losses are those of
    the rows that there are.
    """
    numbers = [2 * rank for rank in range(context.case.world)]
    model = _net(context)
    alone, compiled = copy.deepcopy(model), context.compile(model)
    optimizer, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
    batches = [_rows(context, number) for number in range(max(numbers))]
    mine = [_own(context, rows) for rows in batches[: numbers[context.rank]]]
    losses = []
    for x, labels in rannc_backend.join(mine):
        loss = compiled(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    wanted = []
    for number, (x, labels) in enumerate(batches):
        kept = [rank for rank, count in enumerate(numbers) if number < count]
        parts = [torch.cat([value.chunk(len(numbers))[rank] for rank in kept]) for value in (x, labels)]
        loss = alone(*parts)
        loss.backward()
        plain.step()
        plain.zero_grad()
        wanted.append(float(loss.detach()))
    compare_losses(context, "joined", losses, wanted)
    stopped = len(list(rannc_backend.join(mine, at_end="stop")))
    context.findings.that(stopped == min(numbers), f"{stopped} batches until the shortest loader ends")
    _join_along_another_dimension(context, numbers)

    def failing() -> Any:
        yield mine[0] if mine else batches[0]
        if context.rank == 0:
            raise ValueError("a broken file")
        yield batches[1]

    names = ("ValueError", "RanncError", "RankFailedError", "UserInputError", "CallsDifferError")
    error = context.findings.raises("a loader that fails", names, lambda: list(rannc_backend.join(failing())))
    context.findings.that("a broken file" in str(error), f"the cause is not in {error}")
    context.findings.raises(
        "at_end",
        ("UserInputError",),
        lambda: list(rannc_backend.join(mine, at_end="wait")),  # type: ignore[arg-type]
    )


def _join_along_another_dimension(context: Context, numbers: list[int]) -> None:
    batch = {"x": torch.ones(7, 3, 2), "labels": torch.ones(3), "mask": torch.ones(7, 7)}
    mine = [batch] * numbers[context.rank]
    for number, found in enumerate(rannc_backend.join(mine, batch_dim=1)):
        rows = 3 if number < len(mine) else 0
        shapes = {name: tuple(value.shape) for name, value in found.items()}
        wanted = {"x": (7, rows, 2), "labels": (rows,), "mask": (7, 7)}
        context.findings.that(shapes == wanted, f"batch {number} along dimension 1: {shapes}")


def norms_by_name(context: Context) -> None:
    """Each rank's gradients together, also where replicas hold them, a parameter is frozen, or another order is
    asked for.
    """
    model = _net(context)
    model.last.bias.requires_grad_(False)
    alone, compiled = copy.deepcopy(model), context.compile(model)
    rows = _rows(context, 0)
    compiled(*_own(context, rows)).backward()
    alone(*rows).backward()
    for order in (2.0, float("inf")):
        found = rannc_backend.named_gradient_norms(compiled, order)
        wanted = {
            name: float(torch.linalg.vector_norm(parameter.grad, order))
            for name, parameter in alone.named_parameters()
            if parameter.grad is not None
        }
        context.findings.that(list(found) == list(wanted), f"norms of {list(found)}")
        compare_losses(context, f"norms of order {order}", [*found.values()], [*wanted.values()])


def averages(context: Context) -> None:
    """AveragedModel in each of its forms, with buffers too, and an average by hand: complete in state_dict, and back
    in the model.
    """
    model = _net(context)
    alone, compiled = copy.deepcopy(model), context.compile(model)
    found, wanted = (
        _with_averages(context, net, call, own)
        for net, call, own in ((model, compiled, True), (alone, alone, False))
    )
    for average, plain in zip(found, wanted, strict=True):
        state = average.state_dict()
        values = [name for name in state if name != "n_averaged"]
        context.findings.that(bool(values) == (context.rank == 0), f"{values} on rank {context.rank}")
        if context.rank == 0:
            context.compare_state(state, plain.state_dict(), factor=1e3)
    for net, plain in ((model, found[-1]), (alone, wanted[-1])):
        net.load_state_dict(plain.state_dict())
    found[0].load_state_dict(found[1].state_dict())
    rows = _rows(context, 9)
    with torch.no_grad():
        losses = [float(compiled(*_own(context, rows)))], [float(alone(*rows))]
    compare_losses(context, "the average in the model", *losses)
    if not all(map(rannc_backend.is_held, found[-1].parameters())):
        context.findings.raises(
            "the plain average", ("ReleasedParameterError",), lambda: found[-1](_own(context, rows)[0])
        )


def _with_averages(context: Context, net: Net, call: Any, own: bool) -> list[nn.Module]:
    swa = torch.optim.swa_utils
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[Any] = []
    for number in range(4):
        rows = _rows(context, number)
        call(*(_own(context, rows) if own else rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not number:  # parameters are where their stages are
            found = [
                swa.AveragedModel(net),
                swa.AveragedModel(net, avg_fn=lambda average, new, count: 0.9 * average + 0.1 * new),
                swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9), use_buffers=True),
                copy.deepcopy(net),
            ]
        for average in found[:-1]:
            average.update_parameters(net)
        with torch.no_grad():
            for mean, value in zip(found[-1].parameters(), net.parameters(), strict=True):
                mean.mul_(0.9).add_(value, alpha=0.1)
    return found


def averages_by_values(context: Context) -> None:
    """Averages and changes by way of the values of state_dict(), of which some are copies of what other ranks have, are
    refused on all ranks before they count; what comes after them works.
    """
    model = _net(context)
    compiled = context.compile(model)
    own = _own(context, _rows(context, 0))
    compiled(*own).backward()
    average = copy.deepcopy(model)

    def update() -> None:
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.lerp_(value, 0.1)

    def step() -> None:
        compiled(*own)

    update()
    context.findings.raises("a second update", ("UserInputError",), update)
    for value in model.state_dict().values():
        value.mul_(1.0)
    errors = ("UserInputError", "RankFailedError")
    error = context.findings.raises("a step after a change of values", errors, step)
    context.findings.that("state_dict" in str(error), f"the error says nothing of state_dict: {error}")
    step()
    # What is loaded counts, also where it was changed in place.
    state = model.state_dict()
    for value in state.values():
        value.mul_(0.5)
    model.load_state_dict(state)
    step()
    context.findings.that(
        len(model.state_dict()) == (6 if context.rank == 0 else 0), "the state is not whole"
    )


def unfrozen(context: Context) -> None:
    """Layers that are frozen, and trained again, in mid-training; groups of decay; a scheduler; a hook that comes
    later.
    """
    model = _net(context)
    alone, compiled = copy.deepcopy(model), context.compile(model)
    found, wanted = (
        _with_freezing(context, net, call, own)
        for net, call, own in ((model, compiled, True), (alone, alone, False))
    )
    compare_losses(context, "freezing", found, wanted)


def dropped_beside(context: Context) -> None:
    """A compiled model that one rank drops, and the other keeps, while another trains with a scheduler that changes
    the betas: what the ranks compare stays that of the same step.
    """
    model = _net(context)
    alone, compiled = copy.deepcopy(model), context.compile(model)
    beside = [context.compile(_net(context))]
    beside[0](*_own(context, _rows(context, 0))).backward()

    def drop(number: int) -> None:
        if number == 3 and context.rank == 1:
            beside.clear()
            gc.collect()

    found = _with_freezing(context, model, compiled, True, drop)
    context.findings.that(len(beside) == 1 - context.rank, "no model was dropped")
    compare_losses(context, "beside a dropped model", found, _with_freezing(context, alone, alone, False))


def _with_freezing(
    context: Context, net: Net, call: Any, own: bool, begin: Callable[[int], None] = lambda number: None
) -> list[float]:
    weights, biases = ([p for p in net.parameters() if (p.dim() > 1) == flag] for flag in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8)
    losses = []
    for number in range(8):
        begin(number)
        net.first.requires_grad_(number >= 2)
        net.last.requires_grad_(number not in (4, 5))
        if number == 6:
            net.middle.register_forward_hook(lambda module, inputs, output: 2 * output)
        rows = _rows(context, number)
        loss = call(*(_own(context, rows) if own else rows))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def several_models(context: Context) -> None:
    """A generator against a discriminator, and a frozen teacher beside them."""
    torch.manual_seed(context.case.seed)
    nets = [
        nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, out)).to(context.dtype)
        for out in (WIDTH, 1, 1)
    ]
    nets[2].requires_grad_(False).eval()
    alone = copy.deepcopy(nets)
    compiled = [context.compile(net) for net in nets]
    _adversaries(context, nets, compiled, own=True)
    _adversaries(context, alone, alone, own=False)
    for net, plain in zip(nets, alone, strict=True):
        state = net.state_dict()
        if context.rank == 0:
            context.compare_state(state, plain.state_dict(), factor=1e3)


def _adversaries(context: Context, nets: Sequence[nn.Module], calls: Sequence[Any], *, own: bool) -> None:
    generator, discriminator, teacher = calls
    makes, judges = (torch.optim.Adam(net.parameters(), lr=0.01) for net in nets[:2])
    for number in range(3):
        rows = _rows(context, number)
        x, _ = _own(context, rows) if own else rows
        judges.zero_grad()
        made = generator(x)
        (discriminator(made.detach()) - discriminator(x)).mean().backward()
        judges.step()
        makes.zero_grad()
        with torch.no_grad():
            told = teacher(x)
        (F.mse_loss(discriminator(made), told)).backward()
        makes.step()
