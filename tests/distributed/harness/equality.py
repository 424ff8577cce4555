"""The check of most cases: train some steps, compare everything with one process.

In: a context. Out: findings, and for the parent which gradients this rank has. Order of the comparisons does
not matter: nothing raises, so that all ranks make the same collective calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.harness.context import LATER_STEPS_FACTOR, Context
from tests.distributed.harness.reference import Step, make_optimizer
from tests.model_entry import Batch


def equality(context: Context) -> dict[str, Any]:
    """Losses, rows, scalars and gradients of every step; parameters and buffers after the last; who owns
    what.
    """
    entry, case, findings = context.entry, context.case, context.findings
    reference = context.reference()
    model = context.model()
    optimizer = make_optimizer(entry, model) if entry.trains else None
    compiled = context.compile(model)
    owned: list[str] = []
    for number, expected in enumerate(reference.steps):
        factor = 1.0 if number == 0 else LATER_STEPS_FACTOR
        batch = context.local(context.batch(number))
        if optimizer is not None:
            optimizer.zero_grad()
        outputs = entry.call(compiled, batch)
        _compare_outputs(context, outputs, batch, expected, factor)
        if optimizer is not None:
            entry.loss_of(outputs, batch).backward()
            names = context.compare_gradients(model, expected.gradients, factor=factor)
            findings.that(number == 0 or names == owned, f"step {number}: owns {names}, before {owned}")
            owned = names
            optimizer.step()
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, reference.state, factor=LATER_STEPS_FACTOR)
    if optimizer is not None:
        _compare_optimizer_state(context, model, optimizer, owned)
    return {"owned": owned, "expected": sorted(reference.steps[0].gradients) if case.num_steps else []}


def _compare_outputs(context: Context, outputs: Any, batch: Batch, expected: Step, factor: float) -> None:
    entry, findings = context.entry, context.findings
    tolerance = context.tolerance * factor
    if entry.trains:
        loss = entry.loss_of(outputs, batch)
        findings.close("loss", "loss", loss, expected.losses[context.rank], tolerance)
    if context.case.options.get("outputs") != "loss":
        context.compare_rows(outputs, expected.rows, factor=factor)
    scalars = entry.scalars_of(outputs)
    for name, value in expected.scalars.items():
        findings.close("scalar", name, scalars.get(name), value, tolerance)


def _compare_optimizer_state(
    context: Context, model: nn.Module, optimizer: torch.optim.Optimizer, owned: list[str]
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in optimizer.state if num_elements(optimizer.state[parameter])}
    context.findings.that(
        kept == set(owned), f"the optimizer has state for {sorted(kept)}, but this rank owns {sorted(owned)}"
    )


def num_elements(state: dict[str, Any]) -> int:
    """Elements of all tensors in one entry of an optimizer's state."""
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor))
