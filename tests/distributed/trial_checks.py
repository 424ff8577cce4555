"""Checks of plans that are measured before the first step: which is used, and that nothing else shows it.

In: a context. Out: findings. Every function is collective. Terms. *Seconds* of plans are made up where a check asks for
a certain one to be the fastest; their steps are run all the same.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.ir.plan import Plan
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.context import Context

WIDTH, EXACT = 96, 1e-12


class Layers(nn.Module):
    """Noise, a buffer that each step changes, hooks, a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.num_calls.add_(1)
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return F.cross_entropy(self.head(x), labels)


class _Run:
    """Three steps of training: losses, the whole state, the generator, calls of a hook, lines of the log."""

    def __init__(self, context: Context, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Layers().double()
        compiled = context.compile(self.model, **options)
        optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.num_hooked, self.losses, self.lines = 0, [], list[str]()
        self.model.layers[0].weight.register_hook(self._hook)
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("rannc_backend").addHandler(handler)
        start, stop = context.interval
        rows = sum(context.case.local_rows)
        try:
            for step in range(3):
                numbers = torch.Generator().manual_seed(step)
                x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=numbers)
                labels = torch.randint(0, 4, (rows,), generator=numbers)
                loss = compiled(x[start:stop].clone(), labels[start:stop].clone())
                if step == 0:
                    self.has_gradients = any(p.grad is not None for p in self.model.parameters())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
        finally:
            logging.getLogger("rannc_backend").removeHandler(handler)
        self.generator = torch.get_rng_state()
        session = REGISTRY.of(self.model)
        assert session is not None and session.plan is not None, "not planned"
        self.plan: Plan = session.plan
        self.number = session.counter.number
        self.state = {
            name: rannc_backend.get_param(self.model, name)
            for name in (*dict(self.model.named_parameters()),)
        }
        self.state["num_calls"] = self.model.num_calls.detach().clone()

    def _hook(self, grad: Tensor) -> None:
        self.num_hooked += 1


def _trials_of(seconds: list[float]) -> Any:
    """Trials that run, and say these seconds of one plan after the other."""
    trial, seen = GraphRuntime.trial, list[int]()

    def saying(runtime: GraphRuntime, tensors: Any) -> float:
        if id(runtime) not in seen:
            seen.append(id(runtime))
            kept.append(runtime)
        assert trial(runtime, tensors) > 0
        return seconds[seen.index(id(runtime))]

    kept: list[GraphRuntime] = []  # so that no other has its number
    return mock.patch.object(GraphRuntime, "trial", saying)


def trial_leaves_nothing(context: Context) -> None:
    """Losses, parameters, buffers, random numbers, gradients and hooks are those of a run without measuring."""
    find, best = context.findings, context.case.parameters["best"]
    plain = _Run(context, plan_trial_seconds=0.0)
    seconds = [3.0, 3.0, 3.0]
    seconds[best] = 1.0 + context.rank  # the slowest rank counts
    with _trials_of(seconds):
        run = _Run(context)
    find.that(not run.has_gradients, "a trial has published gradients")
    find.that(run.num_hooked == plain.num_hooked, f"{run.num_hooked} calls of a hook, not {plain.num_hooked}")
    find.that(run.number == plain.number, f"step {run.number}, not {plain.number}")
    find.that(torch.equal(run.generator, plain.generator), "a trial has drawn random numbers")
    for step, losses in enumerate(zip(run.losses, plain.losses, strict=True)):
        find.that(abs(losses[0] - losses[1]) <= EXACT, f"step {step}: loss {losses[0]}, not {losses[1]}")
    for name, value in run.state.items():
        error = float((value - plain.state[name]).abs().max())
        find.that(error <= EXACT, f"{name} is off by {error}")
    rivals = [other for other in plain.plan.alternatives if other.plan]
    find.that(len(rivals) == 2, f"{len(rivals)} plans to be measured beside the first")
    plans = [plain.plan, *(Plan.from_json(other.plan) for other in rivals)]
    used = run.plan.measured_step_seconds
    find.that(used == context.case.world, f"{used} seconds measured")
    find.that(run.plan.stages == plans[best].stages, f"not the stages of plan {best + 1}")
    measured = [other.measured_step_seconds for other in run.plan.alternatives]
    find.that(sorted(x for x in measured if x) == [3.0, 3.0], f"measured {measured}")
    find.that(
        not any(other.plan for other in run.plan.alternatives), "a plan that was measured is still to be"
    )
    expected = f"measured 3 of 3 plans: {', '.join(f'{1e3 * x:.3g}' for x in (3.0, 3.0, 3.0)[:best])}"
    told = [line for line in run.lines if line.startswith("measured 3 of 3 plans")]
    find.that(context.rank != 0 or len(told) == 1, f"log: {told}")
    find.that(context.rank != 0 or told[0].startswith(expected), f"log: {told}")
    find.that(context.rank != 0 or told[0].endswith(f"number {best + 1} is used"), f"log: {told}")


def trial_own_orders(context: Context) -> None:
    """Plans in an order of their own are measured as others are."""
    find = context.findings
    plain = _Run(context, plan_trial_seconds=0.0)
    rivals = [Plan.from_json(other.plan) for other in plain.plan.alternatives if other.plan]
    find.that(bool(rivals), "no plan to be measured beside the first")
    orders = {rival.schedule for rival in rivals}
    find.that(orders == {"list_scheduled"}, f"orders {orders}")
    with _trials_of([3.0, 1.0, *[3.0] * len(rivals)]):
        run = _Run(context)
    find.that(run.plan.stages == rivals[0].stages, "not the stages of the plan that was faster")
    find.that(run.plan.schedule == "list_scheduled", run.plan.schedule)
    for step, losses in enumerate(zip(run.losses, plain.losses, strict=True)):
        find.that(abs(losses[0] - losses[1]) <= EXACT, f"step {step}: loss {losses[0]}, not {losses[1]}")


def trial_is_kept(context: Context) -> None:
    """A job of the same model takes what an earlier one has measured, and measures nothing."""
    find = context.findings
    options = {"plan_cache": True, "cache_dir": str(context.directory / "kept_trials")}
    with _trials_of([3.0, 1.0 + context.rank, 3.0]):
        first = _Run(context, **options)
    again = _Run(context, **options)
    told = [[line for line in run.lines if line.startswith("measured")] for run in (first, again)]
    find.that(context.rank != 0 or (len(told[0]), len(told[1])) == (1, 0), f"log: {told}")
    find.that(again.plan == first.plan, f"another plan: {again.plan.summary()}, not {first.plan.summary()}")
    find.that(again.plan.measured_step_seconds == context.case.world, "not what was measured")
    for step, losses in enumerate(zip(first.losses, again.losses, strict=True)):
        find.that(abs(losses[0] - losses[1]) <= EXACT, f"step {step}: loss {losses[0]}, not {losses[1]}")


def trial_ends_in_time(context: Context) -> None:
    """No other plan is tried when the time is over, and then the predicted one is used."""
    run = _Run(context, plan_trial_seconds=1e-9)
    told = [line for line in run.lines if line.startswith("measured")]
    context.findings.that(context.rank != 0 or "measured 1 of 3 plans" in told[0], f"log: {told}")
    used = run.plan.measured_step_seconds
    context.findings.that(used is not None and used > 0, f"{used} seconds")
    context.findings.that(not any(other.measured_step_seconds for other in run.plan.alternatives), "measured")
