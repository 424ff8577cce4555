"""Checks of what planted faults have changed without any other test noticing: one kind of mistake each.

In: a context. Out: findings. Every function is collective.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.backend import REGISTRY
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.runtime.step.executor import Executor
from tests.distributed.harness.context import Context

WIDTH = 6
LARGE = 2.0**24  # the next float32 is two further on


class Chain(nn.Module):
    """Two layers, the second the last stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def _compiled(
    context: Context, kind: Callable[[], nn.Module]
) -> tuple[nn.Module, Callable[..., Any], nn.Module]:
    torch.manual_seed(0)
    model = kind().to(context.dtype)
    alone = copy.deepcopy(model)
    options = {"stage_starts": "second"} if context.case.num_stages > 1 else {}
    return model, context.compile(model, **options), alone


def rows_of(context: Context, seed: int) -> tuple[Tensor, Tensor]:
    """This rank's rows, and all."""
    x = torch.randn(
        sum(context.case.local_rows),
        WIDTH,
        dtype=context.dtype,
        generator=torch.Generator().manual_seed(seed),
    )
    start, stop = context.interval
    return x[start:stop].clone(), x


class Sums(nn.Module):
    """Sums over the batch of floating numbers, of counts and of differences that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(1.0)
            self.second.weight.fill_(1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.first(x))
        return y.sum(), (y > 0.5).sum()


def partial_sums(context: Context) -> None:
    """Sums of float32 over slices and ranks are added in float64: ones beside 2**24 are not lost, wherever
    they are; counts are exact.
    """
    num_rows = sum(context.case.local_rows)
    start, stop = context.interval
    _, compiled, _ = _compiled(context, Sums)
    for place in range(num_rows):
        x = torch.ones(num_rows, 1, dtype=torch.float32)
        x[place] = LARGE
        exact = int(x.double().sum().item())
        assert float(torch.tensor(exact, dtype=torch.float32)) == exact, "this sum is no float32"
        total, count = compiled(x[start:stop].clone())
        context.findings.that(total.item() == exact, f"2**24 in row {place}: {total.item()}, not {exact}")
        context.findings.that(
            count.item() == num_rows, f"2**24 in row {place}: {count.item()} of {num_rows} are counted"
        )


class Dropped(Chain):
    """Dropout in both stages."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(
            self.second(F.dropout(torch.tanh(self.first(x)), 0.4, self.training)) + 1, 0.4, self.training
        )


def random_rows(context: Context) -> None:
    """Masks follow from rank 0's generator alone, whatever the others have drawn; rows of a batch have masks
    of their own.
    """
    _, compiled, _ = _compiled(context, Dropped)
    x, _ = rows_of(context, 3)
    seen = []
    for others in (100, 200):
        torch.manual_seed(7 if context.rank == 0 else others + context.rank)
        seen.append(compiled(x).detach())
    context.findings.that(torch.equal(*seen), "the masks depend on the generator of a rank other than 0")
    same = compiled(x[:1].expand(len(x), -1).clone()).detach() == 0
    context.findings.that(len(torch.unique(same, dim=0)) > 1, "all rows have one mask")
    masks = [torch.empty_like(same) for _ in range(context.case.world)]
    torch.distributed.all_gather(masks, same)
    context.findings.that(
        not all(torch.equal(masks[0], mask) for mask in masks[1:]), "the ranks' rows have the same masks"
    )


class Normed(Chain):
    """BatchNorm in both stages and a loss inside; the rows come back too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last_norm(self.second(torch.tanh(self.norm(self.first(x)))))
        return y.square().mean(), y


def rerun(context: Context) -> None:
    """A step that is run again for its backward leaves statistics as its forward left them, and has the
    gradients of one process.
    """
    for reason in ("rows", "infinite"):
        torch._dynamo.reset()
        model, compiled, alone = _compiled(context, Normed)
        for number in range(2):
            x, whole = rows_of(context, number)
            model.zero_grad()
            alone.zero_grad()
            loss, rows = compiled(x)
            before = {
                name: value.clone() for name, value in model.named_buffers() if rannc_backend.is_held(value)
            }
            expected, all_rows = alone(whole)
            if reason == "rows":
                if number == 0:  # after it the graph has its backwards in the backward call
                    # The forward that comes between advances them once more.
                    compiled(x)
                    alone(whole)
                    before = {
                        name: value.clone()
                        for name, value in model.named_buffers()
                        if rannc_backend.is_held(value)
                    }
                (loss + rows.square().sum() / len(x)).backward()
                own = [
                    part.square().sum() / len(part) for part in all_rows.split(list(context.case.local_rows))
                ]
                (expected + torch.stack(own).mean()).backward()
                context.compare_gradients(
                    model,
                    {name: p.grad for name, p in alone.named_parameters() if p.grad is not None},
                    factor=10.0,
                )
            else:
                (loss * float("inf")).backward()
            for name, value in before.items():
                same = torch.equal(model.get_buffer(name), value)
                context.findings.that(same, f"{reason} {number}: backward has changed {name}")
            state = model.state_dict()
            if context.rank == 0:
                context.compare_state(state, alone.state_dict(), factor=10.0)


class Scheduled(Chain):
    """Weighs its layers by the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.num_calls += 1
        y = self.second(torch.tanh(self.first(x)) * self.num_calls)
        return y.square().mean(), y


def rerun_reads_buffers(context: Context) -> None:
    """A step that is run again reads the buffers that its forward has read, not what that has made of
    them.
    """
    model, compiled, alone = _compiled(context, Scheduled)
    for number in range(3):
        x, whole = rows_of(context, number)
        model.zero_grad()
        alone.zero_grad()
        loss, rows = compiled(x)
        expected, all_rows = alone(whole)
        (loss + rows.square().sum() / len(x)).backward()
        own = [part.square().sum() / len(part) for part in all_rows.split(list(context.case.local_rows))]
        (expected + torch.stack(own).mean()).backward()
        context.compare_gradients(
            model, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        )
        state = model.state_dict()
        if context.rank == 0:
            context.compare_state(state, alone.state_dict(), factor=1.0)


class Squared(Chain):
    """A loss inside alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def seeds(context: Context) -> None:
    """A loss that is scaled alike in every step costs one step, not two: the gradient that came is the next
    step's seed.
    """
    _, compiled, _ = _compiled(context, Squared)
    x, _ = rows_of(context, 1)
    run = Executor.run
    for dtype, scale in ((torch.float16, 1024.0), (None, 3.0)):
        with mock.patch.object(Executor, "run", autospec=True, side_effect=run) as runs:
            for _ in range(3):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = compiled(x)
                (loss * scale).backward()
        session = REGISTRY.of(compiled._orig_mod)
        context.findings.that(
            float(session.counter.loss_gradient) == scale,
            f"the seed is {session.counter.loss_gradient}, not {scale}",
        )
        context.findings.that(
            runs.call_count == 3 + (dtype is not None),
            f"{runs.call_count} programs for three steps under {dtype}",
        )


class Twice(Chain):
    """One value under two names, and another one."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        # No operator: both are one value of the graph.
        return {"y": y, "again": {"y": y.contiguous()}, "early": torch.tanh(self.first(x))}


def one_value_twice(context: Context) -> None:
    """An output that comes back under two names gets the sum of both gradients."""
    model, compiled, alone = _compiled(context, Twice)
    x, whole = rows_of(context, 2)

    def loss(outputs: dict[str, Any]) -> Tensor:
        weights = torch.arange(1, WIDTH + 1, dtype=context.dtype)
        return (
            (outputs["y"] * weights).sum(1).mean()
            + outputs["again"]["y"].square().sum(1).mean()
            + outputs["early"].mean()
        )

    loss(compiled(x)).backward()
    parts, expected = alone(whole), []
    for start, stop in _intervals(context):
        own = {
            "y": parts["y"][start:stop],
            "again": {"y": parts["again"]["y"][start:stop]},
            "early": parts["early"][start:stop],
        }
        expected.append(loss(own))
    torch.stack(expected).mean().backward()
    context.compare_gradients(
        model, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    )


def _intervals(context: Context) -> list[tuple[int, int]]:
    sizes = context.case.local_rows
    return [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]


class WithTable(Chain):
    """A table that all rows share comes in, and values of parameters alone go out, from each of the
    stages.
    """

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        early, late = self.first.weight.detach(), self.second.weight.detach()
        return (
            self.body(x @ table).square().mean(),
            late.mean(0),
            early.argmax(1),
            (late @ table).abs().amax() > early.std(),
        )


def replicated_outputs(context: Context) -> None:
    """Values without rows come from a rank that has what they are made of, and are the same everywhere, after
    updates too.
    """
    model, compiled, alone = _compiled(context, WithTable)
    table = torch.eye(WIDTH, dtype=context.dtype) * 0.5
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for number in range(3):
        x, whole = rows_of(context, number)
        outputs, expected = compiled(x, table), alone(whole, table)
        for place, (actual, value) in enumerate(zip(outputs, expected, strict=True)):
            if value.is_floating_point():
                context.findings.close(
                    "output", f"{place} of step {number}", actual, value.detach(), context.tolerance
                )
            else:
                context.findings.that(
                    torch.equal(actual, value), f"output {place} of step {number}: {actual}, not {value}"
                )
        for optimizer, first in zip(optimizers, (outputs[0], expected[0]), strict=True):
            optimizer.zero_grad()
            first.backward()
            optimizer.step()


def replicated_inputs(context: Context) -> None:
    """Tables that differ over ranks, in one element of one dtype, are an error on all ranks that names the
    input; equal ones go on.
    """
    _, compiled, _ = _compiled(context, WithTable)
    x, _ = rows_of(context, 4)
    table = torch.eye(WIDTH, dtype=context.dtype)
    compiled(x, table)
    other = table.clone()
    if context.rank == 1:
        other[3, 2] += 1e-9
    error = context.findings.raises("tables", ("RanksDifferError",), lambda: compiled(x, other))
    context.findings.that("table" in str(error), f"not named: {error}")


class Resumed(Chain):
    """A loss inside, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.norm(self.first(x)), 0.2)).square().mean()


class _Training:
    """A model whose loss is scaled, with rows that each rank draws from its own generators."""

    def __init__(self, context: Context, seed: int) -> None:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        self.context = context
        self.model = Resumed()
        self.compiled = context.compile(self.model, stage_starts="second")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, num_steps: int) -> list[Any]:
        """What each step drew, and its loss."""
        seen: list[Any] = []
        for _ in range(num_steps):
            drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
            x = torch.randn(4, WIDTH) * drawn[1]
            self.optimizer.zero_grad()
            loss = self.compiled(x) * 3.0
            loss.backward()
            self.optimizer.step()
            seen.append((drawn, loss.item()))
        return seen

    def counted(self) -> tuple[int, float]:
        """What the backend has counted, on this rank."""
        counter = REGISTRY.of(self.model).counter
        return counter.number, float(counter.loss_gradient)


def _seed_generators(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def resumed(context: Context) -> None:
    """A job that goes on from a checkpoint draws on each rank what that rank would have drawn, counts on, and
    has the same bits.
    """
    path = Path(context.directory) / context.case.name
    find, rank = context.findings, context.rank
    run = _Training(context, 0)
    _seed_generators(10 + rank)
    run.train(3)
    saved = rannc_backend.save_checkpoint(path, run.compiled, run.optimizer)
    find.that(run.counted() == (3, 3.0), f"three steps with a loss times three: {run.counted()}")
    expected = run.train(2)
    after = run.counted()
    rannc_backend.save_checkpoint(path, run.compiled, run.optimizer, step=100)
    states = CheckpointReader(saved).index.parts
    find.that(
        len({repr(sorted(part.random.items())) for part in states}) == context.case.world,
        "ranks have saved the same generators",
    )
    for when in ("before", "after"):
        _seed_generators(99)
        other = _Training(context, 5)
        if when == "after":
            other.train(1)
        loaded = rannc_backend.load_checkpoint(saved, other.compiled, other.optimizer)
        find.that(loaded.step == 3, f"step {loaded.step}")
        early = len(other.optimizer.state)
        find.that(
            when == "after" or not early,
            f"before the plan is known this rank holds the state of {early} parameters",
        )
        actual = other.train(2)
        find.that(
            actual == expected,
            f"loaded {when} the first call: {actual} on this rank, without an interruption {expected}",
        )
        kept = {name for name, p in other.model.named_parameters() if p in other.optimizer.state}
        own = {name for name, p in other.model.named_parameters() if rannc_backend.is_held(p)}
        find.that(
            kept == own,
            f"loaded {when} the first call: state of {sorted(kept)}, and this rank holds {sorted(own)}",
        )
        find.that(
            other.counted() == after,
            f"loaded {when} the first call: counts {other.counted()}, without an interruption {after}",
        )
        again = rannc_backend.save_checkpoint(path, other.compiled, other.optimizer)
        one, two = CheckpointReader(path / "step-00000100"), CheckpointReader(again)
        if rank == 0:
            different = [key for key in one.keys if not torch.equal(one.tensor(key), two.tensor(key))]
            find.that(
                set(one.keys) == set(two.keys) and not different,
                f"loaded {when} the first call: {different} are other bits",
            )
            find.that(
                two.manifest.runtime == one.manifest.runtime,
                f"{two.manifest.runtime}, not {one.manifest.runtime}",
            )
