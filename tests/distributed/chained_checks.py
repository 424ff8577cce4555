"""Checks of models that follow each other: the rows of one are an input of the next, whose loss is inside.

In: a context. Out: findings. The reference is one process on the batches of all ranks, which are of one size.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rannc_backend
from tests.distributed.harness.context import Context
from tests.distributed.loop_checks import WIDTH

ROWS = 12
Run = Callable[["_Scene"], list[Tensor]]


class Judge(nn.Module):
    """A discriminator with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor, label: float) -> Tensor:
        """The loss of [rows, width]."""
        scores = self.layers(x).squeeze(-1)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


class _Scene:
    """The models of one run: compiled ones on this rank's rows, or plain ones on all rows."""

    def __init__(self, context: Context, *, own: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(context.case.seed)
        self.context, self.own = context, own
        makers = [
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).to(context.dtype)
            for _ in range(2)
        ]
        self.before = nn.Linear(WIDTH, WIDTH).to(context.dtype)
        self.nets: list[nn.Module] = [*makers, Judge().to(context.dtype)]
        self.calls: Sequence[Any] = [context.compile(net) if own else net for net in self.nets]

    def rows(self, seed: int) -> Tensor:
        """[rows, width]."""
        numbers = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, WIDTH, generator=numbers, dtype=self.context.dtype)
        return x.tensor_split(self.context.case.world)[self.context.rank].clone() if self.own else x

    def mine(self, tensor: Tensor) -> Tensor:
        """This rank's rows of what all ranks together have."""
        return tensor if self.own else tensor.tensor_split(self.context.case.world)[self.context.rank]

    def optimizer(self, *nets: nn.Module) -> torch.optim.Optimizer:
        """Plain gradient descent: a gradient that is a multiple of the right one shows."""
        return torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.5)


def adversaries(scene: _Scene) -> list[Tensor]:
    """A generator and a discriminator, and beside its loss a distance of a rank's own rows."""
    (maker, _, judge), losses = scene.calls, []
    makes, judges = (scene.optimizer(net) for net in (scene.nets[0], scene.nets[2]))
    for number in range(2):
        real, noise = scene.rows(number), scene.rows(10 + number)
        made = maker(noise)
        judges.zero_grad()
        loss = judge(real, 1.0) + judge(made.detach(), 0.0)
        loss.backward()
        judges.step()
        makes.zero_grad()
        against = judge(made, 1.0)
        (against + 0.1 * F.l1_loss(made, real)).backward()
        makes.step()
        losses += [loss, against]
    return losses


def three_in_a_row(scene: _Scene) -> list[Tensor]:
    """Three models, and the gradient of what the first is given: that of the global loss."""
    first, second, judge = scene.calls
    optimizer, x, found = scene.optimizer(*scene.nets), scene.rows(0).requires_grad_(True), []
    for number in range(2):
        optimizer.zero_grad()
        loss = judge(second(first(x)) + scene.rows(number), 1.0)
        loss.backward()
        optimizer.step()
        found.append(loss)
    # A loss of the rank's own rows: its gradient is the rank's own too.
    inner = scene.rows(5).requires_grad_(True)
    rows = second(first(inner))
    rows.sum().backward()
    return [*found, scene.mine(x.grad), scene.mine(inner.grad)]


def a_layer_before(scene: _Scene) -> list[Tensor]:
    """A plain layer that `synchronize` averages, before a model with its loss inside and before one with rows."""
    return _with_layer(scene, rannc_backend.synchronize(scene.before) if scene.own else scene.before)


def a_layer_in_ddp(scene: _Scene) -> list[Tensor]:
    """The same, averaged by torch."""
    rannc_backend.init()
    return _with_layer(scene, DistributedDataParallel(scene.before) if scene.own else scene.before)


def _with_layer(scene: _Scene, layer: nn.Module) -> list[Tensor]:
    first, _, judge = scene.calls
    optimizer, losses = scene.optimizer(layer, scene.nets[0], scene.nets[2]), []
    for number in range(3):
        optimizer.zero_grad()
        loss = judge(layer(scene.rows(number)), 1.0)
        (loss + first(layer(scene.rows(number))).pow(2).mean() if number else loss).backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *scene.before.parameters()]


def chained(context: Context) -> None:
    """Each of the loops above: what it gives, and the parameters in the end."""
    for run in (adversaries, three_in_a_row, a_layer_before, a_layer_in_ddp):
        own, alone = (_Scene(context, own=own) for own in (True, False))
        found, wanted = run(own), run(alone)
        for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
            context.findings.close(run.__name__, str(number), one.detach(), two.detach(), context.tolerance)
        for net, plain in zip(own.nets, alone.nets, strict=True):
            _compare(context, run.__name__, net, plain)
    _mixed(context)


def _compare(context: Context, what: str, net: nn.Module, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    for name, parameter in net.named_parameters():
        if rannc_backend.is_held(parameter):
            context.findings.close(
                what, name, parameter.detach(), wanted[name].detach(), 10 * context.tolerance
            )


def _mixed(context: Context) -> None:
    """Rows of another model together with a tensor that nobody averages: refused, and the cure works."""
    scene = _Scene(context, own=True)
    (maker, _, judge), layer = scene.calls, copy.deepcopy(scene.before)
    made = maker(scene.rows(0))
    context.findings.raises("mixed", ("UserInputError",), lambda: judge(layer(made), 1.0))
    judge(layer(made.detach()), 1.0).backward()
    judge(rannc_backend.synchronize(layer)(maker(scene.rows(0))), 1.0).backward()


class _Prompt(nn.Module):
    """Adds learned rows to each sample, as soft prompts, textual inversion and universal perturbations do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1.0, 1.0, 3 * WIDTH).view(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width], as x is."""
        return x + self.rows.sum(0)


def prompts(context: Context) -> None:
    """A model, frozen or trained, behind a module with an optimizer of its own: refused where nobody brings the gradients of
    ranks together, and that of one process where `synchronize` does.
    """
    for frozen in (True, False):
        found = []
        for own in (True, False):
            scene = _Scene(context, own=own)
            judge, call, prompt = scene.nets[2], scene.calls[2], _Prompt().to(context.dtype)
            judge.requires_grad_(not frozen)
            if own and frozen:
                _refused(context, scene, _Prompt().to(context.dtype))
            if own:
                rannc_backend.synchronize(prompt)
            optimizers = [torch.optim.SGD(prompt.parameters(), lr=0.5)]
            optimizers += [] if frozen else [torch.optim.SGD(judge.parameters(), lr=0.5)]
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                call(prompt(scene.rows(step)), 1.0).backward()
                for optimizer in optimizers:
                    optimizer.step()
            found.append(prompt.rows.detach())
        error = float((found[0] - found[1]).abs().max())
        context.findings.that(error < 1e-12, f"frozen {frozen}: learned rows are off by {error}")


def _refused(context: Context, scene: _Scene, prompt: nn.Module) -> None:
    optimizer = torch.optim.SGD(prompt.parameters(), lr=0.5)
    scene.calls[2](prompt(scene.rows(0)), 1.0).backward()
    error = context.findings.raises("a prompt", ("UnsynchronizedGradientError",), optimizer.step)
    context.findings.that("behind an input" in str(error), f"another error: {error}")
    # A rank's own rows are its own affair.
    latents = nn.Parameter(scene.rows(0))
    scene.calls[2](2 * latents, 1.0).backward()
    torch.optim.SGD([latents], lr=0.5).step()


def checkpointed(context: Context) -> None:
    """`torch.utils.checkpoint` around a compiled model whose rows go to one with its loss inside: that of one process, or
    refused where it hides whose gradients these are. And rows that are changed in place are refused on all ranks.
    """
    gradients = []
    for own in (True, False):
        scene = _Scene(context, own=own)
        maker, judge = scene.calls[0], scene.calls[2]
        rows = checkpoint(maker, scene.rows(0), use_reentrant=False)
        judge(rows, 1.0).backward()
        gradients.append({name: p.grad for name, p in scene.nets[0].named_parameters()})
        if own:
            # An error of all ranks, also of those that have a slice of what was computed.
            changed = maker(scene.rows(1)).mul_(0.5).sum()
            context.findings.raises("in place", ("UserInputError",), changed.backward)
            hidden = checkpoint(maker, scene.rows(2).requires_grad_(), use_reentrant=True)
            context.findings.raises("reentrant", ("UserInputError",), partial(judge, hidden, 1.0))
    for name, parameter in gradients[0].items():
        if parameter is not None and gradients[1][name] is not None:
            error = float((parameter - gradients[1][name]).abs().max())
            context.findings.that(error < 1e-12, f"{name} is off by {error}")
    context.findings.that(any(p is not None for p in gradients[0].values()), "there are no gradients")


class _Head(nn.Module):
    """Classes from rows, and their loss, outside of the compiled model."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, num_classes)

    def forward(self, rows: Tensor) -> Tensor:
        """The loss of [rows, width]."""
        return F.cross_entropy(self.layer(rows), rows.detach()[:, :3].argmax(-1))


def heads(context: Context) -> None:
    """A head with an optimizer of its own behind a compiled encoder: refused where nobody brings the gradients of ranks
    together; that of one process where `synchronize`, DistributedDataParallel or the user does.
    """
    world = context.case.world
    for way in ("synchronize", "ddp", "by hand", "none"):
        found = []
        for own in (True, False):
            scene = _Scene(context, own=own)
            head: nn.Module = _Head(5).to(context.dtype)
            called = head
            if own and way == "synchronize":
                rannc_backend.synchronize(head)
            elif own and way == "ddp":
                called = DistributedDataParallel(head)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (scene.nets[0], head)]
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                called(scene.calls[0](scene.rows(step))).backward()
                if own and way == "by hand":
                    for parameter in head.parameters():
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= world
                optimizers[0].step()
                if own and way == "none":
                    error = context.findings.raises(
                        "a head", ("UnsynchronizedGradientError",), optimizers[1].step
                    )
                    context.findings.that("after rows" in str(error), f"another error: {error}")
                    return
                optimizers[1].step()
            found.append([*head.parameters()])
        error = max(float((one - two).detach().abs().max()) for one, two in zip(*found, strict=True))
        context.findings.that(error < 1e-12, f"{way}: a head is off by {error}")


def scaled_losses(context: Context) -> None:
    """What scales a loss of the global batch is the same on all ranks, and a layer with as many outputs as a rank has rows is
    told of, since it may be no layer.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rannc_backend")
    logger.addHandler(handler)
    found = []
    for own in (True, False):
        scene = _Scene(context, own=own)
        scale = nn.Parameter(torch.ones(1, dtype=context.dtype))
        optimizer = torch.optim.SGD([scale], lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            (scene.calls[2](scene.rows(step), 1.0) * (-scale).exp() + scale).sum().backward()
            optimizer.step()
        found.append(float(scale.detach()))
    context.findings.that(abs(found[0] - found[1]) < 1e-12, f"the scale of a loss is off: {found}")
    warned = [line for line in said if "beside rows" in line]
    context.findings.that(not warned, f"a scale of a global loss is told of: {warned}")
    scene, head = _Scene(context, own=True), _Head(ROWS // context.case.world).to(context.dtype)
    head(scene.calls[0](scene.rows(0))).backward()
    torch.optim.SGD(head.parameters(), lr=0.5).step()
    logger.removeHandler(handler)
    told = any("the same on all ranks by gradients of each rank's rows" in line for line in said)
    context.findings.that(told or context.rank > 0, f"nothing is said of a layer that may be rows: {said}")


def heads_apart(context: Context) -> None:
    """Heads that go different ways unnoticed by their gradients are found by their values, in the next call at the latest; and
    what ranks have each for itself is not.
    """
    for way in (_probed, _checkpointed_head, _in_closure):
        scene, head = _Scene(context, own=True), _Head(5).to(context.dtype)
        error = context.findings.raises(
            way.__name__,
            ("UnsynchronizedGradientError",),
            partial(way, scene, head, _optimizer_of(way, head)),
        )
        context.findings.that("no longer are" in str(error), f"{way.__name__}: another error: {error}")
    scene, latents = (
        _Scene(context, own=True),
        nn.Parameter(torch.randn(3, WIDTH, dtype=context.dtype) + context.rank),
    )
    optimizer = torch.optim.SGD([latents], lr=0.5)
    for step in range(3):
        with torch.no_grad():
            rows = scene.calls[0](scene.rows(step))
        (rows.sum() * latents).sum().backward()
        optimizer.step()
    scene.calls[0](scene.rows(3))


def synchronized_apart(context: Context) -> None:
    """Ranks that reach different modules, each synchronized by itself, are told so, and their gradients are not mixed; within
    one module they may. Sparse gradients are refused.
    """
    scene, heads = _Scene(context, own=True), nn.ModuleList([_Head(5), _Head(5)]).to(context.dtype)
    for head in heads:
        rannc_backend.synchronize(head)
    own = heads[min(context.rank, 1)]
    loss = own(scene.calls[0](scene.rows(0)))
    context.findings.raises("two modules", ("CallsDifferError",), loss.backward)
    together = nn.ModuleList([_Head(5), _Head(5)]).to(context.dtype)
    rannc_backend.synchronize(together)
    together[min(context.rank, 1)](scene.calls[0](scene.rows(0))).backward()
    found = [parameter.grad is not None for parameter in together.parameters()]
    context.findings.that(all(found), f"gradients of one module: {found}")
    table = nn.Embedding(5, WIDTH, sparse=True).to(context.dtype)
    rannc_backend.synchronize(table)
    rows = scene.calls[0](scene.rows(0))
    product = (rows * table(torch.zeros(len(rows), dtype=torch.int64))).sum()
    error = context.findings.raises("a sparse gradient", ("UserInputError",), product.backward)
    context.findings.that("sparse=True" in str(error), f"another error: {error}")


def _optimizer_of(way: Callable[..., None], head: nn.Module) -> torch.optim.Optimizer:
    if way is _in_closure:
        return torch.optim.LBFGS(head.parameters(), lr=0.1, max_iter=2)
    return torch.optim.SGD(head.parameters(), lr=0.5)


def _probed(scene: _Scene, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            rows = scene.calls[0](scene.rows(step))
        head(rows).backward()
        optimizer.step()


def _checkpointed_head(scene: _Scene, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        checkpoint(head, scene.calls[0](scene.rows(step)), use_reentrant=True).backward()
        optimizer.step()


def _in_closure(scene: _Scene, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = head(scene.calls[0](scene.rows(step)))
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()


def heads_in_one_optimizer(context: Context) -> None:
    """A head beside the encoder in one optimizer: that of one process where the user brings gradients together, refused where
    ranks have different heads, or more of them.
    """
    found = []
    for own in (True, False):
        scene, head = _Scene(context, own=own), _Head(5).to(context.dtype)
        optimizer = torch.optim.SGD([*scene.nets[0].parameters(), *head.parameters()], lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            head(scene.calls[0](scene.rows(step))).backward()
            for parameter in head.parameters() if own else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= context.case.world
            optimizer.step()
        found.append([*head.parameters()])
    error = max(float((one - two).detach().abs().max()) for one, two in zip(*found, strict=True))
    context.findings.that(error < 1e-12, f"a head in one optimizer is off by {error}")
    scene, more = _Scene(context, own=True), nn.ModuleList([_Head(5), _Head(4)]).to(context.dtype)
    rows = scene.calls[0](scene.rows(0))
    losses = [head(rows) for head in [*more][: 1 + (context.rank > 0)]]
    torch.stack(losses).sum().backward()
    step = torch.optim.SGD([*scene.nets[0].parameters(), *more.parameters()], lr=0.5).step
    context.findings.raises("more heads on one rank", ("UnsynchronizedGradientError",), step)
    scene, head = _Scene(context, own=True), _Head(5).to(context.dtype)
    head(scene.calls[0](scene.rows(0)).detach()).backward()
    step = torch.optim.SGD([*scene.nets[0].parameters(), *head.parameters()], lr=0.5).step
    context.findings.raises("a head on detached rows", ("UnsynchronizedGradientError",), step)
