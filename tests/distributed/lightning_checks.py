"""Checks of Lightning: Fabric, and what its Trainer does around a module.

In: a context. Out: findings. The reference is Lightning by itself in one process, on the batches of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.integrations.fabric import RanncFabricStrategy
from tests.distributed.conformance_checks import run_example
from tests.distributed.harness.context import Context
from tests.distributed.loop_checks import WIDTH, compare_losses


@contextlib.contextmanager
def default_dtype(context: Context) -> Iterator[None]:
    """Lightning converts what a model gives to torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(context.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fabric(context: Context) -> None:
    """The example for Fabric: accumulation, clipping, accuracy, and resuming in one process from a checkpoint of all ranks,
    and on all ranks from one of one process.
    """
    path, *alone = (
        context.directory / f"{context.case.name}-{each}.ckpt" for each in ("ranks", 0, context.rank)
    )
    with default_dtype(context):
        found = run_example(context, "--save", str(path))
        compare_losses(context, "training", found, run_example(context, "--plain", "--save", str(alone[1])))
        rannc_backend.barrier()
        for saved in (path, alone[0]):
            again = ("--resume", str(saved))
            found, wanted = (run_example(context, *flags, *again) for flags in ((), ("--plain",)))
            compare_losses(context, f"resumed from {saved.name}", found, wanted)


class _Steps(L.LightningModule):
    """A LightningModule, whose steps Fabric calls by way of the compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        return self(*batch)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The same."""
        return F.cross_entropy(self.net(x), labels)


def fabric_parts(context: Context) -> None:
    """What else Fabric has: steps of a LightningModule, mixed precision, values cut by size, exchanged values; a model that
    is not compiled is refused.
    """
    with default_dtype(context):
        found, wanted = (_fabric_losses(context, "64-true", plain=plain) for plain in (False, True))
    compare_losses(context, "a LightningModule", found, wanted)
    found, wanted = (_fabric_losses(context, "bf16-mixed", plain=plain) for plain in (False, True))
    # Before the first update each row is rounded as in one process, afterwards sums over rows are rounded by rank.
    near = [abs(one - two) / two for one, two in zip(found, wanted, strict=True)]
    context.findings.that(
        max(near[:2]) < 1e-5 and max(near) < 1e-2, f"bf16-mixed: {found} instead of {wanted}"
    )
    ranks = L.Fabric(strategy=RanncFabricStrategy(), accelerator="cpu")
    ranks.launch()
    size = context.case.world
    value = torch.tensor([1.0 + context.rank])
    ranks.all_reduce(value, reduce_op="sum")
    context.findings.that(float(value) == size * (size + 1) / 2, f"the sum is {value}")
    gathered: Any = ranks.all_gather({"rank": torch.tensor(context.rank)})
    context.findings.that(gathered["rank"].tolist() == list(range(size)), f"gathered {gathered}")
    sent = ranks.broadcast({"rank": context.rank, 2: (None, [1.5, Path("a")], b"b")}, src=1)
    context.findings.that(sent == {"rank": 1, 2: (None, [1.5, Path("a")], b"b")}, f"broadcast {sent}")
    number = ranks.broadcast((value * (context.rank + 1),), src=1)[0]
    context.findings.that(float(number) == size * (size + 1), f"broadcast {number}")
    error = context.findings.raises(
        "an object", ("UserInputError",), lambda: ranks.broadcast([{"what": context.rank and context}], src=1)
    )
    context.findings.that("Context" in str(error), f"the class is not in {error}")
    error = context.findings.raises("a plain model", ("UserInputError",), lambda: _train_plainly(ranks))
    context.findings.that("before fabric.setup" in str(error), f"no cure in {error}")
    lone = L.Fabric(accelerator="cpu", devices=1)
    net = lone.setup(context.compile(nn.Linear(WIDTH, 1)))
    error = context.findings.raises(
        "one process", ("LaunchError", "RankFailedError"), lambda: net(torch.ones(2, WIDTH))
    )
    context.findings.that("Lightning sees 1 process" in str(error), f"no cause in {error}")


def _fabric_losses(context: Context, precision: str, *, plain: bool) -> list[float]:
    """Losses of three steps over the rows of all ranks, each of two forwards."""
    torch._dynamo.reset()
    strategy: Any = "auto" if plain else RanncFabricStrategy()
    ranks = L.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)  # type: ignore[arg-type]
    ranks.launch()
    torch.manual_seed(context.case.seed)
    module: Any = _Steps()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    if not plain:
        module = context.compile(module)
    module, optimizer = ranks.setup(module, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(6):
        count = 4 * context.case.world
        x = torch.randn(count, WIDTH, generator=generator)
        labels = torch.randint(0, 3, (count,), generator=generator)
        own = [each.chunk(ranks.world_size)[ranks.global_rank] for each in (x, labels)]
        with ranks.no_backward_sync(module, enabled=number % 2 == 0):
            # In one process Fabric calls a step of the module's own, outside of mixed precision.
            loss = module(*own) if precision == "bf16-mixed" else module.training_step(own, number)
            ranks.backward(loss)
        losses.append(float(ranks.all_reduce(loss.detach().clone())))
        if number % 2:
            ranks.clip_gradients(module, optimizer, clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _train_plainly(ranks: L.Fabric) -> None:
    net: Any = nn.Linear(WIDTH, 1)
    net, optimizer = ranks.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ranks.backward(net(torch.ones(2, WIDTH)).sum())
    optimizer.step()
