"""Points of the contract about what a call is for: training, evaluation, inference, the loss alone.

In: a context. Out: findings. Terms as in contract_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

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
