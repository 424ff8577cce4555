"""Checks of buffers that a model changes: every rank that keeps one has its new value, whatever graph came
first.

In: a context. Out: findings. The reference is one process, eager, on the global batch; with BatchNorm one
micro-batch and one replica a stage, where the contract is exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.harness.context import Context

WIDTH = 6


class Normalized(nn.Module):
    """BatchNorm in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last_norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_norm(self.second(torch.tanh(self.norm(self.first(x)))))


class Counting(nn.Module):
    """A counter of steps that both stages read: with the number of steps, everything changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_steps += 1
        x = torch.tanh(self.first(x)) * self.num_steps
        return self.second(x) / (1 + self.num_steps)


class CountingWholes(Counting):
    """The counter is an integer, beside BatchNorm, whose own counter counts micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.eval()

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return Counting.forward(self, self.norm(x))


class Averaging(nn.Module):
    """Buffers that are assigned, not changed in place: of parameters, of the batch, and of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("of_inputs", torch.zeros(WIDTH))
        self.register_buffer("of_weights", torch.zeros(WIDTH))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_steps = self.num_steps + 1
            self.of_inputs = 0.9 * self.of_inputs + 0.1 * x.detach().mean(0)
            self.of_weights = self.of_weights.lerp(self.second.weight.detach().mean(0), 0.1)
        x = torch.tanh(self.first(x - self.of_inputs))
        return self.second(x * self.num_steps) + self.of_weights


class Meeting(nn.Module):
    """A mean over the rows before a stage, which a buffer behind it takes; a number chooses another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.divisor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.second(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
        return (y + self.average) / self.divisor


class CountingLoss(Counting):
    """The same with its loss, so that backwards run among the forwards."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = Counting.forward(self, x)
        return y.square().mean(), y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normalized": Normalized,
    "counting": Counting,
    "counting_wholes": CountingWholes,
    "averaging": Averaging,
    "meeting": Meeting,
}


def _compile(context: Context, model: nn.Module) -> Callable[..., Any]:
    return context.compile(model, **({"stage_starts": "second"} if context.case.num_stages > 1 else {}))


def buffers(context: Context) -> None:
    """Training, evaluation and training without gradients in the order that the case names: rows, gradients
    and the whole state.
    """
    find, case = context.findings, context.case
    torch.manual_seed(0)
    model = MODELS[case.parameters["model"]]().to(context.dtype)
    plain = copy.deepcopy(model)
    compiled = _compile(context, model)
    start, stop = context.interval
    for number, mode in enumerate(case.parameters["modes"]):
        x = torch.randn(
            sum(case.local_rows), WIDTH, dtype=context.dtype, generator=torch.Generator().manual_seed(number)
        )
        for each in (model, plain):
            each.train(mode != "eval")
            each.zero_grad()
            if isinstance(each, Meeting):
                each.divisor = 1.0 + number // 2
        with torch.set_grad_enabled(mode == "train"):
            rows, expected = compiled(x[start:stop].clone()), plain(x)
        find.close("rows", f"{mode} {number}", rows, expected[start:stop], context.tolerance)
        if mode == "train":
            rows.square().mean().backward()
            losses = [own.square().mean() for own in expected.split(list(case.local_rows))]
            torch.stack(losses).mean().backward()
            context.compare_gradients(
                model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            )
        state: dict[str, Any] = model.state_dict()
        if context.rank == 0:
            context.compare_state(state, plain.state_dict(), factor=10.0)


def buffers_of_one_rank(context: Context) -> None:
    """Two stages of one rank, of which one makes the new value of a buffer that both read: each step reads that of
    before.
    """
    find = context.findings
    torch.manual_seed(0)
    model = CountingLoss().to(context.dtype)
    plain = copy.deepcopy(model)
    compiled = context.compile(model, stage_starts="second")
    start, stop = context.interval
    for number, mode in enumerate(("train", "no_grad", "eval", "train")):
        x = torch.randn(
            sum(context.case.local_rows),
            WIDTH,
            dtype=context.dtype,
            generator=torch.Generator().manual_seed(number),
        )
        for each in (model, plain):
            each.train(mode != "eval")
            each.zero_grad()
        with torch.set_grad_enabled(mode != "no_grad"):
            (loss, rows), (expected_loss, expected) = compiled(x[start:stop].clone()), plain(x)
        find.close("loss", f"{mode} {number}", loss, expected_loss, context.tolerance)
        find.close("rows", f"{mode} {number}", rows, expected[start:stop], context.tolerance)
        if mode != "no_grad":
            loss.backward()
            expected_loss.backward()
            context.compare_gradients(
                model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            )
        state: dict[str, Any] = model.state_dict()
        if context.rank == 0:
            context.compare_state(state, plain.state_dict(), factor=10.0)


def statistics_of_replicas(context: Context) -> None:
    """Replicas have the same statistics after a pass in training mode, with gradients or without: evaluation
    does not ask who computes.
    """
    torch.manual_seed(0)
    model = Normalized().to(context.dtype)
    compiled = context.compile(model)
    # Each rank's rows are of another size, so that each replica sees others.
    x = torch.randn(context.case.local_rows[context.rank], WIDTH, dtype=context.dtype) * (1 + context.rank)
    for gradients in (True, False):
        model.train()
        with torch.set_grad_enabled(gradients):
            compiled(x)
        whole = model.state_dict()
        model.eval()
        same = torch.ones(2, WIDTH, dtype=context.dtype)
        with torch.no_grad():
            rows = compiled(same)
        plain = Normalized().to(context.dtype).eval()
        if context.rank == 0:
            plain.load_state_dict(whole)
        sizes = [torch.empty_like(value) for value in plain.state_dict().values()]
        for value, (name, tensor) in zip(sizes, plain.state_dict().items(), strict=True):
            value.copy_(tensor)
            torch.distributed.broadcast(value, 0)
            plain.state_dict()[name].copy_(value)
        with torch.no_grad():
            context.findings.close("rows", f"gradients {gradients}", rows, plain(same), context.tolerance)


def replaced(context: Context) -> None:
    """A parameter, or a layer, that is replaced after the first call: an error that names it, on all
    ranks.
    """
    model = Normalized().to(context.dtype)
    compiled = _compile(context, model)
    x = torch.randn(context.case.local_rows[context.rank], WIDTH, dtype=context.dtype)
    compiled(x)
    before = model.second
    model.second = nn.Linear(WIDTH, WIDTH).to(context.dtype)
    error = context.findings.raises("a layer", ("UserInputError",), lambda: compiled(x))
    context.findings.that("'second.weight'" in str(error), f"not named: {error}")
    model.second = before
    compiled(x).sum().backward()
    model.first.bias = nn.Parameter(torch.ones(WIDTH, dtype=context.dtype))
    error = context.findings.raises("a parameter", ("UserInputError",), lambda: compiled(x))
    context.findings.that("'first.bias'" in str(error), f"not named: {error}")
