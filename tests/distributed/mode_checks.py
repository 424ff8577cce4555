"""Points of the contract about what a call is for: training, evaluation, inference, the loss alone.

In: a context. Out: findings. Terms as in contract_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rannc_backend.session_registry import REGISTRY
from tests.distributed.contract_checks import _agree, _loss, _start, released
from tests.distributed.harness.context import Context


def modes(context: Context) -> None:
    """train, eval and no_grad by turns, other sizes in eval; the owners stay, and training goes on as if
    nothing had been.
    """
    entry, findings = context.entry, context.findings
    model, compiled, alone = _start(context)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, alone.model)]
    gone: list[str] = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = context.batch(step)
        _loss(context, compiled, batch).backward()
        alone.backward(batch)
        _agree(context, model, alone, f"gradient of step {step}")
        for optimizer in optimizers:
            optimizer.step()
        findings.that(
            step == 0 or released(model) == gone, f"step {step}: released {released(model)}, before {gone}"
        )
        gone = released(model)
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.eval()
        alone.model.eval()
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                wanted = context.batch(50 + step)
                context.compare_rows(
                    entry.call(compiled, context.local(wanted)),
                    dict(entry.rows_of(alone.loss(wanted)[0])),
                    factor=1e3,
                )
        same = all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters() if p.grad is not None)
        findings.that(same and released(model) == gone, f"eval of step {step} changed gradients or owners")
        model.train()
        alone.model.train()
        with torch.no_grad():
            rows = entry.rows_of(entry.call(compiled, context.local(batch)))
            findings.that(
                not any(value.requires_grad for value in rows.values()),
                "no_grad gave a differentiable output",
            )


def eval_differentiated(context: Context) -> None:
    """Gradients in eval mode: running statistics instead of those of the batch, no dropout; after a training
    step.
    """
    entry = context.entry
    model, compiled, alone = _start(context)
    with torch.no_grad():
        for m in (model, alone.model):
            for name, buffer in m.named_buffers():
                if name.endswith("running_var"):
                    buffer.mul_(0.5)
    model.eval()
    alone.model.eval()
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        batch = context.batch(step)
        outputs = entry.call(compiled, context.local(batch))
        local = context.local(batch)
        entry.loss_of(outputs, local).backward()
        alone.backward(batch)
        _agree(context, model, alone, f"gradient in eval, step {step}")


def eval_first(context: Context) -> None:
    """The first call is in eval and no_grad; training afterwards is exact."""
    entry = context.entry
    model, compiled, alone = _start(context)
    model.eval()
    alone.model.eval()
    with torch.no_grad():
        batch = context.batch(9)
        context.compare_rows(
            entry.call(compiled, context.local(batch)), dict(entry.rows_of(alone.loss(batch)[0]))
        )
    model.train()
    alone.model.train()
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        _loss(context, compiled, context.batch(step)).backward()
        alone.backward(context.batch(step))
        _agree(context, model, alone, f"gradient after eval, step {step}")


def loss_only(context: Context) -> None:
    """With outputs="loss" the loss and the gradients are exact, and touching another output raises an error
    that says so.
    """
    entry, findings = context.entry, context.findings
    model, compiled, alone = _start(context)
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        batch = context.batch(step)
        local = context.local(batch)
        outputs = entry.call(compiled, local)
        loss = entry.loss_of(outputs, local)
        loss.backward()
        findings.close("loss", "loss", loss, alone.backward(batch), context.tolerance)
        _agree(context, model, alone, f"gradient of step {step}")
        rows = next(iter(entry.rows_of(outputs).values()))
        touches: dict[str, Callable[[Any], Any]] = {
            "+": lambda value: value + 1,
            "sum": lambda value: value.sum(),
            "item": lambda value: value.flatten()[0].item(),
        }
        for what, touch in touches.items():
            error = findings.raises(f"touching by {what}", ("OutputNotAvailableError",), partial(touch, rows))
            findings.that(
                error is None or "outputs" in str(error), f"the error does not name the option: {error}"
            )


class WideHead(nn.Module):
    """A loss and logits that are larger than the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16).double(), nn.Linear(16, 2048).double()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


def outputs_by_room(context: Context) -> None:
    """By default logits beside a loss come back where the plan leaves room for them. Where it does not, the loss and
    gradients are exact, reading the logits raises an error that names the option, and without a gradient they come.
    """
    findings = context.findings
    generator = torch.Generator().manual_seed(3)
    rows = sum(context.case.local_rows)
    batch = {
        "x": torch.randn(rows, 8, generator=generator, dtype=torch.float64),
        "target": torch.randint(2048, (rows,), generator=generator),
    }
    own = slice(*context.interval)
    local = {name: value[own] for name, value in batch.items()}

    def step(what: str, **options: Any) -> tuple[nn.Module, Any, Any, dict[str, Tensor]]:
        model, alone, compiled, _ = context.pair(WideHead, **options)
        found, wanted = compiled(**local), alone(**batch)
        found["loss"].backward()
        wanted["loss"].backward()
        findings.close("loss", what, found["loss"], wanted["loss"], context.tolerance)
        gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        context.compare_gradients(model, gradients, kind=f"gradient, {what}")
        return model, compiled, found, wanted

    model, _, found, _ = step("loss", outputs="loss")
    plan = REGISTRY.plan_of(model)
    assert plan is not None
    fullest = max(stage.predicted.peak_bytes for stage in plan.stages)
    findings.that("'loss'" in plan.outputs_left_out, "the plan does not say that no outputs were asked for")

    _, _, found, wanted = step("with room")
    findings.close("logits", "with room", found["logits"], wanted["logits"][own], context.tolerance)

    limit_gb = (fullest + 2**20) / (1 - 0.1) / 2**30
    model, compiled, found, wanted = step("without room", mem_limit_gb=limit_gb, mem_margin=0.1)
    plan = REGISTRY.plan_of(model)
    assert plan is not None
    findings.that("leaves" in plan.outputs_left_out, f"not left out: {plan.outputs_left_out!r}")
    touches: dict[str, Callable[[Any], Any]] = {
        "+": lambda value: value + 1,
        "shape": lambda value: value.shape,
        "in a list": lambda value: torch.cat([value, value]),
        "by keyword": lambda value: torch.sum(input=value),
        "float": lambda value: float(value),
        "numpy": lambda value: value.numpy(),
    }
    for what, touch in touches.items():
        error = findings.raises(
            f"touching by {what}", ("OutputNotAvailableError",), partial(touch, found["logits"])
        )
        findings.that(
            error is None or ("leaves" in str(error) and '"outputs": "all"' in str(error)),
            f"the error does not name the reason and the option: {error}",
        )
    findings.that("leaves" in repr(found["logits"]), "its text does not say why")
    with torch.no_grad():
        found = compiled(**local)
    findings.close("logits", "no gradient", found["logits"], wanted["logits"][own], context.tolerance)
