"""Checks of single points of the semantics, run by the workers: one function per point, found by its name.

In: a context. Out: findings (as side effect) and results for the parent. Every function is collective: all
ranks make the same calls in the same order whatever they find. Terms as in harness/context.py; *alone* is the
plain model in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rannc_backend.capture import graph as capture
from rannc_backend.runtime.absent_tensors import is_absent
from tests.distributed.harness.context import Context
from tests.distributed.harness.reference import intervals
from tests.model_entry import Batch


class Alone:
    """The plain model on the global batch; gradients add up in it as they do in the model under test."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.model = context.model()

    def loss(self, batch: Batch, rows: Sequence[int] = ()) -> tuple[Any, Tensor]:
        """Outputs for the global batch, and what is differentiated: the loss inside, or the mean of the
        ranks' losses.

        Args:
            rows: rows per rank, when they are not those of the case.
        """
        entry, case = self._context.entry, self._context.case
        outputs = entry.call(self.model, batch)
        if entry.loss_inside:
            return outputs, entry.loss_of(outputs, batch)
        own = [
            entry.loss_of(outputs[start:stop], entry.slice(batch, start, stop))
            for start, stop in intervals(tuple(rows) or case.local_rows)
        ]
        return outputs, torch.stack(own).mean()

    def backward(self, batch: Batch, weight: float = 1.0) -> Tensor:
        """Add the gradients of weight * loss; give the loss."""
        loss = self.loss(batch)[1]
        (loss * weight).backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients so far, by name."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def released(model: nn.Module) -> list[str]:
    """Parameters whose memory this rank has given back."""
    return [name for name, parameter in model.named_parameters() if is_absent(parameter)]


def _start(context: Context) -> tuple[nn.Module, Callable[..., Any], Alone]:
    model = context.model()
    return model, context.compile(model), Alone(context)


def _loss(context: Context, compiled: Callable[..., Any], batch: Batch) -> Tensor:
    local = context.local(batch)
    return context.entry.loss_of(context.entry.call(compiled, local), local)


def _agree(context: Context, model: nn.Module, alone: Alone, kind: str, *, scale: float = 1.0) -> None:
    context.compare_gradients(model, alone.gradients(), kind=kind, scale=scale)


def one_trace(context: Context) -> None:
    """Dynamo traces once for training and once for evaluation, though parameters have moved: not once more
    for either.
    """
    model, compiled, alone = _start(context)
    with mock.patch.object(capture, "capture_or_restart", wraps=capture.capture_or_restart) as traces:
        for number in range(3):
            model.zero_grad()
            _loss(context, compiled, context.batch(number)).backward()
        context.findings.that(bool(released(model)), "no parameter has moved")
        context.findings.that(traces.call_count == 1, f"{traces.call_count} traces for training")
        model.eval()
        with torch.no_grad():
            for number in range(2):
                _loss(context, compiled, context.batch(number))
        context.findings.that(traces.call_count == 2, f"{traces.call_count} traces with evaluation")
    alone.backward(context.batch(2))
    model.train()
    _agree(context, model, alone, "gradient")


def gradients_scaled(context: Context) -> None:
    """Gradients of the first step are the expected ones times a number (gradients_reduce_method)."""
    model, compiled, alone = _start(context)
    batch = context.batch()
    _loss(context, compiled, batch).backward()
    alone.backward(batch)
    _agree(context, model, alone, "gradient", scale=context.case.parameters["scale"])


def sizes_change(context: Context) -> None:
    """Other sizes in every step, down to one row per rank."""
    entry, case = context.entry, context.case
    model, compiled, alone = _start(context)
    for step, rows in enumerate(case.parameters["rows_of_steps"]):
        batch = entry.batch(sum(rows), step, context.dtype)
        start, stop = intervals(rows)[context.rank]
        local = entry.slice(batch, start, stop)
        model.zero_grad()
        alone.model.zero_grad()
        outputs = entry.call(compiled, local)
        entry.loss_of(outputs, local).backward()
        expected, loss = alone.loss(batch, rows)
        loss.backward()
        for name, value in entry.rows_of(expected).items():
            context.findings.close(
                "rows",
                f"{name} of step {step}",
                entry.rows_of(outputs)[name],
                value[start:stop],
                context.tolerance,
            )
        if entry.loss_inside:
            context.findings.close(
                "loss", f"of step {step}", entry.loss_of(outputs, local), loss, context.tolerance
            )
        _agree(context, model, alone, f"gradient of step {step}")


def accumulate(context: Context) -> None:
    """Gradients add up over three backwards; after zero_grad in both ways they start anew."""
    model, compiled, alone = _start(context)
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        alone.model.zero_grad(set_to_none=set_to_none)
        for step in range(3):
            _loss(context, compiled, context.batch(step)).backward()
            alone.backward(context.batch(step))
        _agree(context, model, alone, f"sum of gradients (set_to_none={set_to_none})")


def incoming_gradient(context: Context) -> None:
    """The loss is multiplied by another number in every step before backward, as by a GradScaler."""
    model, compiled, alone = _start(context)
    for step, weight in enumerate((3.0, 3.0, 0.25, -1.0)):
        model.zero_grad()
        alone.model.zero_grad()
        (_loss(context, compiled, context.batch(step)) * weight).backward()
        alone.backward(context.batch(step), weight)
        _agree(context, model, alone, f"gradient times {weight}")


def retain_graph(context: Context) -> None:
    """Two backwards through one forward double the gradient; a third without retained graph is an error."""
    model, compiled, alone = _start(context)
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        loss = _loss(context, compiled, context.batch(step))
        loss.backward(retain_graph=True)
        loss.backward()
        alone.backward(context.batch(step), 2.0)
        _agree(context, model, alone, f"twice the gradient of step {step}")


def forward_twice(context: Context) -> None:
    """A second forward before the first backward: in order, in reverse, and through the sum of both
    losses.
    """
    model, compiled, alone = _start(context)
    for order in ("in order", "in reverse", "sum"):
        model.zero_grad()
        alone.model.zero_grad()
        losses = [_loss(context, compiled, context.batch(step)) for step in range(2)]
        if order == "sum":
            (losses[0] + 2 * losses[1]).backward()
        else:
            for loss, weight in list(zip(losses, (1.0, 2.0)))[:: 1 if order == "in order" else -1]:
                (loss * weight).backward()
        alone.backward(context.batch(0))
        alone.backward(context.batch(1), 2.0)
        _agree(context, model, alone, f"gradient of two forwards, {order}")


def forward_without_backward(context: Context) -> None:
    """A training forward whose loss is never differentiated leaves no gradient and nothing behind for the
    next step.
    """
    model, compiled, alone = _start(context)
    _loss(context, compiled, context.batch(7))
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    context.findings.that(not left, f"a forward alone left gradients of {left}")
    for step in range(2):
        _loss(context, compiled, context.batch(7 + step))
        model.zero_grad()
        alone.model.zero_grad()
        _loss(context, compiled, context.batch(step)).backward()
        alone.backward(context.batch(step))
        _agree(context, model, alone, f"gradient after an unused forward, step {step}")


def rows_differentiated(context: Context) -> None:
    """Only the scalar at first, then a row output too, then the scalar alone again; always exact."""
    entry, findings = context.entry, context.findings
    model, compiled, alone = _start(context)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rannc_backend").addHandler(handler)
    for step, with_rows in enumerate((False, True, True, False)):
        model.zero_grad()
        alone.model.zero_grad()
        batch = context.batch(step)
        local = context.local(batch)
        outputs = entry.call(compiled, local)
        expected, loss = alone.loss(batch)
        own = entry.loss_of(outputs, local)
        if with_rows:
            own = own + sum(value.square().mean() for value in entry.rows_of(outputs).values())
            parts = [
                value[start:stop].square().mean()
                for value in entry.rows_of(expected).values()
                for start, stop in intervals(context.case.local_rows)
            ]
            loss = loss + torch.stack(parts).sum() / context.case.world
        own.backward()
        loss.backward()
        _agree(context, model, alone, f"gradient of step {step}{' with rows' if with_rows else ''}")
        context.compare_rows(outputs, dict(entry.rows_of(expected)))
    logging.getLogger("rannc_backend").removeHandler(handler)
    said = [text for text in messages if "fill-drain" in text or "fill_drain" in text]
    findings.that(
        context.rank != 0 or len(said) <= 1, f"the change of the schedule was said {len(said)} times: {said}"
    )


def only_rows_differentiated(context: Context) -> None:
    """The scalar output is ignored and a row output is differentiated, from the first step on."""
    entry = context.entry
    model, compiled, alone = _start(context)
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        batch = context.batch(step)
        rows = next(iter(entry.rows_of(entry.call(compiled, context.local(batch))).values()))
        rows.square().mean().backward()
        expected = next(iter(entry.rows_of(alone.loss(batch)[0]).values()))
        own = [expected[start:stop].square().mean() for start, stop in intervals(context.case.local_rows)]
        torch.stack(own).mean().backward()
        _agree(context, model, alone, f"gradient of rows, step {step}")


def input_gradients(context: Context) -> None:
    """Gradients with respect to this rank's rows of an input, over two backwards, beside those of
    parameters.
    """
    entry = context.entry
    model, compiled, alone = _start(context)
    batch = context.batch()
    local = context.local(batch)
    local["x"].requires_grad_(True)
    batch["x"].requires_grad_(True)
    for count in (1, 2):
        entry.loss_of(entry.call(compiled, local), local).backward()
        alone.backward(batch)
        start, stop = context.interval
        expected = batch["x"].grad[start:stop]
        context.findings.close(
            "input gradient", f"after {count}", local["x"].grad, expected, context.tolerance
        )
        _agree(context, model, alone, f"gradient after {count}")


def gradient_through_the_input(context: Context) -> None:
    """A trained module before the compiled one gets its gradient through the input."""
    entry, findings = context.entry, context.findings
    model, compiled, alone = _start(context)
    before = nn.Linear(6, 6).to(context.dtype)
    with torch.no_grad():
        before.weight.copy_(torch.eye(6) * 0.5)
        before.bias.zero_()
    batch = context.batch()
    local = context.local(batch)
    entry.loss_of(entry.call(compiled, local | {"x": before(local["x"])}), local).backward()
    leaf = (batch["x"] @ before.weight.detach().t()).requires_grad_(True)
    alone.backward(batch | {"x": leaf})
    start, stop = context.interval
    expected = leaf.grad[start:stop].t() @ batch["x"][start:stop]
    findings.close("gradient before", "weight", before.weight.grad, expected, context.tolerance)
    _agree(context, model, alone, "gradient")


def rank_0_feeds(context: Context) -> None:
    """gather_inputs=False: rank 0's batch is the global batch, whatever the others pass."""
    entry = context.entry
    model, compiled, alone = _start(context)
    for step in range(2):
        model.zero_grad()
        alone.model.zero_grad()
        batch = entry.batch(6, step, context.dtype)
        passed = (
            batch if context.rank == 0 else {name: torch.zeros_like(value) for name, value in batch.items()}
        )
        loss = entry.loss_of(entry.call(compiled, passed), passed)
        loss.backward()
        context.findings.close("loss", "of rank 0's batch", loss, alone.backward(batch), context.tolerance)
        _agree(context, model, alone, f"gradient of step {step}")


def nested_inputs(context: Context) -> None:
    """A dict inside the keyword arguments."""
    entry = context.entry
    model, compiled, alone = _start(context)
    batch = context.batch()
    batch |= {"shift": torch.flip(batch["features"], dims=(1,))}
    local = context.local(batch)
    outputs = compiled(labels=local["labels"], extra={"shift": local["shift"]}, features=local["features"])
    outputs.loss.backward()
    expected = alone.model(
        features=batch["features"], extra={"shift": batch["shift"]}, labels=batch["labels"]
    )
    expected.loss.backward()
    context.findings.that(type(outputs) is type(expected), f"the output is a {type(outputs).__name__}")
    context.findings.close("loss", "loss", outputs.loss, expected.loss, context.tolerance)
    context.compare_rows(outputs, dict(entry.rows_of(expected)))
    _agree(context, model, alone, "gradient")


def compiled_in_place(context: Context) -> None:
    """model.compile(backend="rannc") instead of torch.compile(model); with the loss outside, of a module that
    is torch's own.
    """
    model, alone = context.model(), Alone(context)
    if not context.entry.loss_inside:
        model, alone.model = nn.Sequential(*model.layers), nn.Sequential(*alone.model.layers)
    model.compile(**context.compile_arguments())
    _loss(context, model, context.batch()).backward()
    alone.backward(context.batch())
    _agree(context, model, alone, "gradient")


def two_models(context: Context) -> None:
    """Two models of one class, trained by turns: each has its own parameters, plan and gradients."""
    entry = context.entry
    pairs = []
    for seed in (0, 1):
        model, plain = (entry.model(seed, context.dtype) for _ in range(2))
        alone = Alone(context)
        alone.model = plain
        pairs.append((model, context.compile(model), alone))
    for step in range(2):
        for model, compiled, alone in pairs:
            model.zero_grad()
            alone.model.zero_grad()
            loss = _loss(context, compiled, context.batch(step))
            loss.backward()
            context.findings.close(
                "loss", f"of step {step}", loss, alone.backward(context.batch(step)), context.tolerance
            )
            _agree(context, model, alone, f"gradient of step {step}")


def same_random_rows(context: Context) -> dict[str, Any]:
    """Two steps of dropout, kept in a file for the parent; masks agree between forward, backward and
    recompute.
    """
    entry, findings = context.entry, context.findings
    model, compiled, _ = _start(context)
    torch.manual_seed(123)
    kept: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        batch = context.batch(0)
        loss, rows = entry.call(compiled, context.local(batch))
        loss.backward()
        # The loss has degree one in every weight, so that <weight, gradient> is the loss if and only if masks
        # agree.
        for name, p in model.named_parameters():
            if p.grad is not None:
                findings.close(
                    "Euler",
                    f"{name}, step {step}",
                    (p.detach() * p.grad).sum(),
                    loss.detach(),
                    context.tolerance,
                )
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        kept[f"step{step}"] = {"loss": loss.detach(), "rows": rows.detach(), "gradients": gradients}
    findings.that(
        not torch.equal(kept["step0"]["rows"], kept["step1"]["rows"]), "both steps have the same masks"
    )
    path = context.directory / f"{context.case.name}-{context.rank}.pt"
    torch.save(kept, path)
    return {"path": str(path)}


def too_many_shapes(context: Context) -> None:
    """Slices of tensors as inputs, of more lengths than Dynamo's limit of compilations. One compilation too many
    for another reason is an error on every rank, not the plain model's NaN; the rest goes on.
    """
    model, compiled, alone = _start(context)

    def step(length: int) -> None:
        batch = {name: value[:, :length] for name, value in context.batch(0).items()}
        model.zero_grad()
        alone.model.zero_grad()
        loss = _loss(context, compiled, batch)
        loss.backward()
        context.findings.close("loss", f"of length {length}", loss, alone.backward(batch), context.tolerance)
        _agree(context, model, alone, f"gradient of length {length}")

    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (5, 4, 3, 2, 5, 3):
            step(length)
        model.eval()
        context.findings.raises("a length in another mode", ("UserInputError",), lambda: step(3))
        model.train()
        step(4)


def seed_decides(context: Context) -> None:
    """torch.manual_seed repeats the masks of a step; the share of zeros is that of the probability."""
    entry, findings = context.entry, context.findings
    model, compiled, _ = _start(context)
    rows = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        rows.append(entry.call(compiled, context.local(context.batch(0)))[1].detach())
    findings.that(torch.equal(rows[0], rows[2]), "the same seed gave other masks")
    findings.that(not torch.equal(rows[0], rows[1]), "another seed gave the same masks")
    share = (rows[0] == 0).double().mean().item()
    findings.that(0.15 < share < 0.45, f"{share:.2f} of the values were dropped with probability 0.3")
