"""`memory_report`: what a model's ranks hold, beside what their plan predicted.

In: a model that has been called. Out: a report, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.report.memory_report import MemoryReport, memory_report_of
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.trace.allocations import optimizer_tensors, unique_bytes
from rannc_backend.session import Session
from rannc_backend.session_registry import REGISTRY


def memory_report(
    model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
) -> MemoryReport:
    """What each stage holds in memory, in bytes: predicted by the plan, and measured on its fullest rank. Collective.

    Parameters, gradients, optimizer state and messages are those of now. Activations and the peak are those of the first
    training steps, which are measured after some to warm up; until then, and where option ``report_steps`` is 0, they
    are not known. With option ``offload``, parameters and gradients are the most of both that a step has had on the
    device; what lies on the host is a line of its own. ``print(memory_report(model, optimizer))`` shows a table.

    Args:
        model: The model, compiled or not.
        optimizers: Those that train it. Without them the state is not known.

    Returns:
        The bytes of each stage by kind, the same on all ranks.

    Raises:
        UserInputError: The model has not been called yet.
    """
    session = REGISTRY.of(model)
    if session is None or session.plan is None:
        raise UserInputError(
            "memory_report of a model that is not planned yet", cure="call the compiled model once before."
        )
    given = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    session.world.monitor.phase("memory_report")
    records = agree(session.world, "memory_report", _record(session, given))
    session.world.monitor.phase("between steps")
    return memory_report_of(session.plan, records)


def _record(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int | None]:
    """This rank's bytes by kind."""
    root = session.root()
    assert root is not None, "the model is gone"
    parameters = list(root.parameters())
    weights = [*parameters, *root.buffers()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    messages = (tensor for runtime in session.runtimes.values() for tensor in runtime.message_tensors())
    found = {
        "parameters": unique_bytes(weights),
        "gradients": unique_bytes([*gradients, *session.pool.tensors()]),
        "optimizer": unique_bytes(optimizer_tensors(optimizers, parameters)) if optimizers else None,
        "messages": unique_bytes(messages),
        "step": session.measured.get("step_bytes"),
        "peak": session.measured.get("peak_bytes"),
        "host": 0,
    }
    link = session.host_link
    if link is None:
        return found
    step = found["step"]
    state = found["optimizer"]
    on_host = None if state is None else unique_bytes(parameters) + (found["gradients"] or 0) + state
    return found | {
        "parameters": unique_bytes(root.buffers()) + link.parameters.peak_bytes,
        "gradients": link.gradients.peak_bytes,
        "optimizer": 0,
        # Which has copies and sums in it.
        "step": None
        if step is None
        else max(0, step - link.parameters.peak_bytes - link.gradients.peak_bytes),
        "host": on_host,
    }
