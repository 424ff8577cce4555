"""Checks of option offload: what lies where, and that stages compute with the values that parameters have now.

In: a context. Out: findings. Every function is collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend
from rannc_backend.backend import REGISTRY
from rannc_backend.runtime.comm.host_link import HostLink
from tests.distributed.harness.context import Context
from tests.distributed.zero_checks import EXACT, OPTIMIZERS, Pair


def _link(model: nn.Module) -> HostLink:
    session = REGISTRY.of(model)
    assert session is not None and session.host_link is not None, "not planned yet, or not with offload"
    return session.host_link


def _bytes_at_rest(link: HostLink) -> tuple[int, int]:
    """Of parameters and gradients on the device. A thread of gloo lets go of what it has summed a moment later."""
    for _ in range(100):
        if not (link.parameters.live_bytes or link.gradients.live_bytes):
            break
        time.sleep(0.02)
    return link.parameters.live_bytes, link.gradients.live_bytes


def offload_pools(context: Context) -> None:
    """Parameters, gradients and optimizer state are on the host; what a step has on the device is no more than the
    plan's account, and nothing of it stays.
    """
    find = context.findings
    pair = Pair(context, OPTIMIZERS["adamw"], report_steps=2)
    for step in range(6):
        pair.backward(step)
        link = _link(pair.model)
        left = _bytes_at_rest(link)
        find.that(left == (0, 0), f"step {step}: {left} bytes of parameters and gradients stay on the device")
        for name, parameter in pair.model.named_parameters():
            grad = parameter.grad
            on_host = parameter.device.type == "cpu" and (grad is None or grad.device.type == "cpu")
            find.that(on_host, f"{name} is not on the host")
        pair.step()
        pair.compare(f"step {step}")
    report = rannc_backend.memory_report(pair.model, pair.optimizers[0])
    session = REGISTRY.of(pair.model)
    assert session is not None and session.plan is not None, "planned by now"
    (own,) = (stage for stage in report.stages if context.rank in stage.ranks)
    measured, predicted = own.measured, own.predicted
    buffers = sum(each.nbytes for each in pair.model.buffers())
    held = [p for p in pair.model.parameters() if rannc_backend.is_held(p)]
    copied = {name for index in own.stages for name in session.plan.stages[index].parameters}
    sizes = {name: p.nbytes for name, p in pair.model.named_parameters()}
    expected = sum(sizes[name] for name in copied)
    find.that(measured.parameters == expected + buffers, f"copies of {expected} bytes: {measured}")
    find.that(predicted.optimizer == measured.optimizer == 0, f"state on the device: {own}")
    # Gradients begin at multiples of 128 bytes.
    find.that(measured.gradients <= predicted.gradients + 128 * len(held), f"gradients on the device: {own}")
    find.that((measured.host or 0) >= 3 * sum(p.nbytes for p in held if p.grad is None) // 4, f"host: {own}")
    find.that((measured.host or 0) <= (predicted.host or 0) + 4096, f"on the host: {own}")
    known = measured.peak is not None and predicted.peak is not None
    find.that(known, f"a peak that is not known: {own}")
    if measured.peak is not None and predicted.peak is not None:
        find.that(measured.peak <= predicted.peak * 1.1 + 8192, f"a peak beyond the account: {own}")
    find.that("on the host" in str(report), f"{report}")


def _changes(module: nn.Module) -> tuple[Callable[[nn.Module], None], ...]:
    """Ways in which a script changes parameters between calls."""

    def in_place(each: nn.Module) -> None:
        with torch.no_grad():
            for parameter in each.parameters():
                if rannc_backend.is_held(parameter):
                    parameter.mul_(1.25)

    def through_data(each: nn.Module) -> None:
        for parameter in each.parameters():
            if rannc_backend.is_held(parameter):
                parameter.data.sub_(0.125)  # no version tells of it

    def replaced(each: nn.Module) -> None:
        for parameter in each.parameters():
            if rannc_backend.is_held(parameter):
                parameter.data = parameter.data * 0.5 + 0.0625

    return in_place, through_data, replaced


def offload_changes(context: Context) -> None:
    """Training and evaluation in turns, and parameters that change in between in every way: no copy is stale."""
    pair = Pair(context, OPTIMIZERS["sgd"])

    def evaluated(what: str) -> None:
        ids = pair.ids(100)
        start, stop = context.interval
        with torch.no_grad():
            values = [pair.compiled(ids[start:stop].clone()), pair.alone(ids)]
        error = float((values[0] - values[1]).abs())
        context.findings.that(error <= EXACT, f"{what}: off by {error}")
        live = _link(pair.model).parameters.live_bytes
        context.findings.that(live == 0, f"{what}: {live} bytes stay on the device")

    for step, change in enumerate(_changes(pair.model)):
        pair.backward(step)
        evaluated(f"evaluation before step {step}")
        pair.step()
        evaluated(f"evaluation after step {step}")
        change(pair.model)
        change(pair.alone)
        evaluated(f"evaluation after change {step}")
        pair.backward(10 + step)
        pair.step()
        pair.compare(f"after change {step}")
    state = pair.model.state_dict()
    if context.rank == 0:
        halved: dict[str, Tensor] = {name: value * 0.5 for name, value in state.items()}
    else:
        halved = {}
    pair.model.load_state_dict(halved, strict=context.rank == 0)
    pair.alone.load_state_dict({name: value * 0.5 for name, value in pair.alone.state_dict().items()})
    evaluated("evaluation after loading")
    pair.backward(20)
    pair.step()
    pair.compare("after loading")


def offload_held_graph(context: Context) -> None:
    """A graph that is kept for another backward keeps its copies, and what would read others is an error."""
    pair = Pair(context, OPTIMIZERS["sgd"], schedule=context.case.parameters["schedule"])
    deferred = context.case.parameters["schedule"] == "fill_drain"
    ids = pair.ids(0)
    start, stop = context.interval
    losses: list[Any] = [pair.compiled(ids[start:stop].clone()), pair.alone(ids)]
    live = _link(pair.model).parameters.live_bytes
    context.findings.that((live > 0) == deferred, f"{live} bytes between a forward and its backward")
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    del losses, loss
    for name, parameter in pair.model.named_parameters():
        expected = dict(pair.alone.named_parameters())[name].grad
        if parameter.grad is not None and expected is not None:
            error = float((parameter.grad - expected).abs().max())
            context.findings.that(error <= EXACT, f"gradient of {name}: off by {error}")
    live = _link(pair.model).parameters.live_bytes
    context.findings.that(live == 0, f"{live} bytes stay on the device")
    loss = pair.compiled(ids[start:stop].clone())
    with torch.no_grad():
        for parameter in pair.model.parameters():
            if rannc_backend.is_held(parameter):
                parameter.add_(1.0)
    if deferred:
        context.findings.raises("a change before backward", ("UserInputError",), loss.backward)
    else:
        loss.backward()
