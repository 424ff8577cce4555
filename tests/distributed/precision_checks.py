"""Checks of mixed precision over ranks: autocast, GradScaler, models in bfloat16.

In: a context. Out: findings, and scales for the parent. Every function is collective. Terms as in
contract_checks.py. *Narrow* checks have one micro-batch and one replica per stage: eager stages then run the
very operators of plain torch, rounding to 16 bits included, and only sums in float32 may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from tests.distributed.contract_checks import Alone, _loss
from tests.distributed.harness.compare import relative_error, torch_dtype
from tests.distributed.harness.context import Context

WIDTH = 8
NUM_LAYERS = 8
# Float32 sums in another order; in narrow checks.
NARROW = 2e-6


class Chain(nn.Module):
    """Layers one after the other, the loss in float32; under autocast every value between two layers has 16
    bits.

    ``lift``: the first layer's weights are small and its inputs large by this factor, so that its gradient
    alone overflows.
    """

    def __init__(self, lift: float = 1.0) -> None:
        super().__init__()
        self.lift = lift
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        with torch.no_grad():
            self.layers[0].weight.mul_(1 / lift)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x * self.lift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(x.float(), target)


def _batch(context: Context, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    rows = sum(context.case.local_rows)
    x, target = torch.randn(2, rows, WIDTH, generator=generator)
    return x, target


def _chains(context: Context, lift: float = 1.0) -> tuple[nn.Module, Callable[..., Any], nn.Module]:
    torch.manual_seed(7)
    model, plain = Chain(lift), Chain(lift)
    plain.load_state_dict(model.state_dict())
    return model, context.compile(model), plain


def autocast_structure(context: Context) -> dict[str, Any]:
    """Under autocast the stages do what one process does, to the rounding of sums; values between stages have
    16 bits.
    """
    from rannc_backend.backend import REGISTRY

    findings = context.findings
    dtype = torch_dtype(context.case.parameters["autocast"])
    model, compiled, plain = _chains(context)
    start, stop = context.interval
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        x, target = _batch(context, step)
        with torch.autocast("cpu", dtype=dtype):
            loss, expected = compiled(x[start:stop], target[start:stop]), plain(x, target)
        loss.backward()
        expected.backward()
        findings.close("loss", f"step {step}", loss, expected, NARROW)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        context.compare_gradients(model, gradients, factor=NARROW / context.tolerance)
    session = REGISTRY.sessions[model]
    (runtime,) = session.runtimes.values()
    edges = runtime.shapes_at((), True).edges
    between = {
        value.dtype for (src, dst), edge in edges.items() if src >= 0 and dst >= 0 for value in edge.forward
    }
    findings.that(between == {dtype}, f"values of {between} pass between stages")
    return {"edges": len(edges)}


def autocast_accuracy(context: Context) -> None:
    """With micro-batches and replicas: as near to float64 as one process under autocast is."""
    entry, findings = context.entry, context.findings
    dtype = torch_dtype(context.case.parameters["autocast"])
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    exact = entry.model(context.case.seed, torch.float64)
    for step in range(3):
        for module in (model, alone.model, exact):
            module.zero_grad()
        batch = context.batch(step)
        with torch.autocast("cpu", dtype=dtype):
            loss, expected = _loss(context, compiled, batch), alone.loss(batch)[1]
        loss.backward()
        expected.backward()
        truth = _exact_loss(context, exact, step)
        truth.backward()
        if entry.loss_inside:  # outside, it is of this rank's rows
            # By luck one process may be nearer than a rounding to eight bits.
            allowed = max(2 * relative_error(expected, truth), 2.0**-8)
            error = relative_error(loss, truth)
            findings.that(
                error <= allowed,
                f"step {step}: the loss is off by {error:.1e}, in one process by {allowed / 2:.1e}",
            )
        _as_near(context, model, alone.model, exact, f"step {step}")


def _exact_loss(context: Context, exact: nn.Module, step: int) -> Tensor:
    """The loss in float64 on the batch of the case's own dtype."""
    batch = {name: v.double() if v.is_floating_point() else v for name, v in context.batch(step).items()}
    alone = Alone(context)
    alone.model = exact
    return alone.loss(batch)[1]


def _as_near(context: Context, model: nn.Module, plain: nn.Module, exact: nn.Module, what: str) -> None:
    """All gradients of this rank together are as near to float64 as in one process, within a factor of
    two.
    """
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    owned = [name for name, p in ours.items() if p.grad is not None]
    if not owned:
        return
    parts = [
        [tensors[name].grad.double().flatten() for name in owned]
        for tensors in (ours, theirs, dict(exact.named_parameters()))
    ]
    mine, plains, truth = (torch.cat(part) for part in parts)
    error, allowed = relative_error(mine, truth), 2 * relative_error(plains, truth)
    context.findings.worst[f"gradient, times one process's error, {what}"] = 2 * error / allowed
    context.findings.that(
        error <= allowed, f"{what}: gradients are off by {error:.1e}, in one process by {allowed / 2:.1e}"
    )


def in_bfloat16(context: Context) -> None:
    """A model whose parameters and inputs are bfloat16, trained some steps."""
    entry, findings = context.entry, context.findings
    model, alone = context.model(), Alone(context)
    exact = entry.model(context.case.seed, torch.float32).to(torch.bfloat16).double()
    compiled = context.compile(model)
    for step in range(3):
        for module in (model, alone.model, exact):
            module.zero_grad()
        batch = context.batch(step)
        loss, expected = _loss(context, compiled, batch), alone.loss(batch)[1]
        loss.backward()
        expected.backward()
        truth = _exact_loss(context, exact, step)
        truth.backward()
        findings.that(
            loss.dtype == expected.dtype, f"the loss is {loss.dtype}, in one process {expected.dtype}"
        )
        if entry.loss_inside:
            error = relative_error(loss, truth)
            # Rounded once to eight bits, beside what the model's own operators have rounded.
            allowed = 2 * relative_error(expected, truth) + 2.0**-8
            findings.that(
                error <= allowed,
                f"step {step}: the loss is off by {error:.1e}, in one process by {allowed / 2:.1e}",
            )
        same = all(p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
        findings.that(same, "gradients have another dtype than their parameters")
        _as_near(context, model, alone.model, exact, f"step {step}")


def _plant(model: nn.Module, name: str) -> None:
    gradient = dict(model.named_parameters())[name].grad
    if gradient is not None:
        gradient.view(-1)[0] = float("inf")


def scaler_steps(context: Context) -> dict[str, Any]:
    """GradScaler in float64, exactly: growth, infinities planted in one stage's gradients, unscale_ with
    clipping in between.
    """
    findings = context.findings
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    pairs = []
    for module in (model, alone.model):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        pairs.append((module, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)))
    planted = context.case.parameters["planted"]
    scales = []
    for step in range(8):
        batch = context.batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # leaves float64 alone
            losses = (_loss(context, compiled, batch), alone.loss(batch)[1])
        for (module, optimizer, scaler), loss in zip(pairs, losses):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if str(step) in planted:
                _plant(module, planted[str(step)])
        _compare(context, model, alone.model, f"scaled gradient of step {step}")
        before = {
            name: p.detach().clone() for name, p in model.named_parameters() if rannc_backend.is_held(p)
        }
        for module, optimizer, scaler in pairs:
            if step % 2:
                scaler.unscale_(optimizer)
                clip = rannc_backend.clip_grad_norm_ if module is model else torch.nn.utils.clip_grad_norm_
                clip(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        moved = [
            name
            for name, p in model.named_parameters()
            if p.grad is not None and not torch.equal(p, before[name])
        ]
        findings.that(
            bool(moved) == (str(step) not in planted) or not owns_any(model), f"step {step} moved {moved}"
        )
        scales.append(pairs[0][2].get_scale())
        findings.that(
            scales[-1] == pairs[1][2].get_scale(),
            f"step {step}: scale {scales[-1]}, in one process {pairs[1][2].get_scale()}",
        )
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, dict(alone.model.state_dict()), factor=1e3)
    return {"scales": scales, "owns": owns_any(model)}


def owns_any(model: nn.Module) -> bool:
    """Whether this rank has a gradient."""
    return any(p.grad is not None for p in model.parameters())


def _compare(context: Context, model: nn.Module, plain: nn.Module, kind: str) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if p.grad is None or q.grad is None:
            continue
        mine, expected = p.grad.isfinite(), q.grad.isfinite()
        context.findings.that(torch.equal(mine, expected), f"{kind}, {name}: other values are not finite")
        context.findings.close(
            kind, name, p.grad.where(mine, 0), q.grad.where(expected, 0), context.tolerance * 1e3
        )


def overflow_in_one_stage(context: Context) -> dict[str, Any]:
    """float16 whose first layer's gradient overflows by itself, in one stage: all skip what one process
    skips, and recover alike.
    """
    findings = context.findings
    lift = 2.0**9
    model, compiled, plain = _chains(context, lift)
    start, stop = context.interval
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-4) for module in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3) for _ in range(2)]
    scales, finite = [], []
    for step in range(14):
        x, target = _batch(context, step)
        parts = ((compiled, x[start:stop], target[start:stop]), (plain, x, target))
        for (call, own, wanted), optimizer, scaler in zip(parts, optimizers, scalers):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = call(own, wanted)
            scaler.scale(loss).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
        last = all(bool(p.grad.isfinite().all()) for p in plain.layers[NUM_LAYERS - 2 :].parameters())
        for optimizer, scaler in zip(optimizers, scalers):
            scaler.step(optimizer)
            scaler.update()
        findings.that(last or step < 4, f"step {step}: the last layers overflow too")
        scales.append(scalers[0].get_scale())
        findings.that(
            scales[-1] == scalers[1].get_scale(),
            f"step {step}: scale {scales[-1]}, in one process {scalers[1].get_scale()}",
        )
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if p.grad is not None:
            findings.close("parameter", name, p.detach(), q.detach(), 1e-4)
    return {"scales": scales, "finite": finite}


def scales_differ(context: Context) -> None:
    """Ranks with different scales would add gradients that do not fit: an error on all of them, and the job
    goes on.
    """
    model = context.model()
    compiled = context.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + context.rank))
    scaler.scale(_loss(context, compiled, context.batch())).backward()
    error = context.findings.raises("different scales", ("RanksDifferError",), lambda: scaler.step(optimizer))
    context.findings.that(
        error is None or "scale" in str(error), f"the error does not speak of scales: {error}"
    )
    rannc_backend.barrier()


def scaler_of_another_model(context: Context) -> None:
    """A scaler for a model that is not compiled is this rank's own business."""
    model = context.model()
    _loss(context, context.compile(model), context.batch()).backward()
    own = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(own(torch.ones(1, 2)).sum() * (float("inf") if context.rank == 0 else 1.0)).backward()
    before = own.weight.detach().clone()
    scaler.step(optimizer)
    context.findings.that(
        torch.equal(before, own.weight) == (context.rank == 0), "a rank skipped another's step"
    )
