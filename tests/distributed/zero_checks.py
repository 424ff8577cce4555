"""Checks of ZeRO by ownership: each parameter has one replica that updates it, and a training is that of one
process.

In: a context. Out: findings. Every function is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import rannc_backend
from rannc_backend.backend import REGISTRY
from rannc_backend.errors import RanncError
from tests.distributed.harness.context import Context

WIDTH, LENGTH, WORDS = 6, 5, 11
EXACT = 1e-12


class Tied(nn.Module):
    """A loss inside, a table that the first and the last stage use, a layer that is frozen, parameters of any
    number of dimensions, and one that is never used. `is_short`: without the middle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_short = False
        self.table = nn.Embedding(WORDS, WIDTH)
        self.first, self.frozen, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.table(ids)))
        if not self.is_short:
            hidden = self.norm(self.second(self.frozen(hidden)) + hidden)
        return F.cross_entropy(F.linear(hidden, self.table.weight).flatten(0, 1), ids.roll(1, 1).flatten())


class ByColumns(torch.optim.Optimizer):
    """Not elementwise: the mean over rows of a parameter's gradient, and its norm, decide the update."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad - p.grad.mean(0)
                    # As old code writes it: no version tells of it.
                    p.data.add_(state["sum"] / (1 + state["sum"].norm()), alpha=-group["lr"])


def _groups(module: nn.Module, **more: Any) -> list[dict[str, Any]]:
    """Two groups: matrices and the others."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() == 2]},
        {"params": [p for p in parameters if p.dim() != 2], **more},
    ]


class MuonAndAdam:
    """As Muon's documentation says: it for matrices, AdamW for the others."""

    def __init__(self, module: nn.Module) -> None:
        matrices, others = (group["params"] for group in _groups(module))
        self.both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


OPTIMIZERS: Mapping[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(_groups(module, weight_decay=0.0), lr=0.01, weight_decay=0.1),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.05),
    "muon": MuonAndAdam,
    "by_columns": lambda module: ByColumns(module.parameters()),
}


class Pair:
    """A model under the backend and its copy in one process, each with its optimizer."""

    def __init__(
        self, context: Context, make_optimizer: Callable[[nn.Module], Any], make: Any = Tied, **options: Any
    ) -> None:
        self.context = context
        self.model, self.alone, self.compiled, _ = context.pair(lambda: make().double(), **options)
        self.optimizers = [make_optimizer(self.model), make_optimizer(self.alone)]

    @property
    def updated(self) -> dict[str, bool]:
        """By parameter's name: whether this rank updates it."""
        session = REGISTRY.of(self.model)
        assert session is not None and session.table is not None, "not planned yet"
        table, rank = session.table, self.context.rank
        return {name: rank in table.updaters(name) for name, _ in self.model.named_parameters()}

    @property
    def has_others(self) -> bool:
        """Whether this rank shares the work of updating with others."""
        session = REGISTRY.of(self.model)
        assert session is not None and session.table is not None, "not planned yet"
        table, rank = session.table, self.context.rank
        return any(len(each.of(rank)[1]) > 1 for name, each in table.updates.items() if table.owns(name))

    def ids(self, seed: int) -> Tensor:
        rows = sum(self.context.case.local_rows)
        return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))

    def backward(self, seed: int, scale: float = 1.0) -> None:
        """A forward and backward of both."""
        ids = self.ids(seed)
        start, stop = self.context.interval
        losses = [self.compiled(ids[start:stop].clone()), self.alone(ids)]
        error = float((losses[0] - losses[1]).detach().abs())
        self.context.findings.that(error <= EXACT, f"loss of seed {seed}: off by {error}")
        for loss in losses:
            (loss * scale).backward()

    def step(self) -> None:
        """A step of both."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self, what: str) -> None:
        """All values that this rank holds."""
        expected = dict(self.alone.named_parameters())
        for name, parameter in self.model.named_parameters():
            if rannc_backend.is_held(parameter):
                error = float((parameter.detach() - expected[name].detach()).abs().max())
                self.context.findings.that(error <= EXACT, f"{what}: {name} is off by {error}")


def zero_optimizers(context: Context) -> None:
    """Two backwards, clipping and a step; gradients and state where a parameter is updated, and nowhere else."""
    find = context.findings
    pair = Pair(context, OPTIMIZERS[context.case.parameters["optimizer"]])
    for step in range(4):
        for part in range(1 + step % 2):
            pair.backward(10 * step + part)
        updated = pair.updated
        expected = {name: p.grad for name, p in pair.alone.named_parameters()}
        for name, parameter in pair.model.named_parameters():
            has = parameter.grad is not None
            find.that(has == (updated[name] and expected[name] is not None), f"gradient of {name}: {has}")
            if has and expected[name] is not None:
                error = float((parameter.grad - expected[name]).abs().max())
                find.that(error <= EXACT, f"gradient of {name} in step {step}: off by {error}")
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (pair.model, pair.alone)]
        find.that(float((norms[0] - norms[1]).abs()) <= EXACT, f"norms {norms}")
        pair.step()
        pair.compare(f"step {step}")
    optimizer = pair.optimizers[0]
    for each in getattr(optimizer, "both", [optimizer]):
        names = {id(p): name for name, p in pair.model.named_parameters()}
        kept = {names[id(p)] for p, state in each.state.items() if state}
        find.that(all(pair.updated[name] for name in kept), f"state of {sorted(kept)}")
    find.that(not pair.has_others or not all(pair.updated.values()), "this rank updates everything")


class Noting(torch.optim.Optimizer):
    """Notes how many parameters each of its steps updates."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.noted: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [
            (p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        self.noted.append(len(held))
        for p, lr in held:
            assert p.grad is not None
            p.add_(p.grad, alpha=-lr)


def zero_in_parts(context: Context) -> None:
    """The option num_apply_group: steps in parts, with or without ZeRO, also of one rank; hooks see one step."""
    pair, calls = Pair(context, lambda module: Noting(_groups(module, lr=0.05))), []
    pair.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    for step in range(3):
        pair.backward(step)
        held = sum(p.grad is not None for p in pair.model.parameters())
        pair.step()
        pair.compare(f"step {step}")
        noted, alone = (each.noted for each in pair.optimizers)
        number = context.case.options["num_apply_group"]
        context.findings.that(sum(noted) == held, f"{noted} of {held} parameters are updated")
        context.findings.that(
            1 < len(noted) <= number or held < 2, f"{held} parameters are updated in {noted}"
        )
        context.findings.that(len(alone) == 1, f"an optimizer of no compiled model steps in {alone}")
        noted.clear()
        alone.clear()
        context.findings.that(len(calls) == step + 1, f"{len(calls)} hooks after {step + 1} steps")
    context.findings.raises("a closure", ("GroupedStepError",), lambda: pair.optimizers[0].step(lambda: 0.0))


def zero_between(context: Context) -> None:
    """What a loop reads and writes between a step and the next call: hooks, an average, a clamp, states."""
    pair = Pair(context, OPTIMIZERS["adamw"])
    seen: list[dict[str, Tensor]] = []

    def note(stepped: Any, args: Any, kwargs: Any) -> None:
        if stepped is pair.optimizers[0]:
            held = [(name, p) for name, p in pair.model.named_parameters() if rannc_backend.is_held(p)]
            seen.append({name: p.detach().clone() for name, p in held})

    everywhere = register_optimizer_step_post_hook(note)
    pair.optimizers[0].register_step_post_hook(note)
    averages: list[dict[str, Tensor]] = [{}, {}]
    for step in range(3):
        pair.backward(step)
        pair.step()
        if step == 1:
            pair.optimizers[0].register_step_post_hook(note)
        context.findings.that(len(seen) == 2 + (step == 2), f"{len(seen)} hooks were called")
        for values in seen:
            expected = dict(pair.alone.named_parameters())
            _compare(context, "seen by a hook", values, {name: expected[name] for name in values})
        seen.clear()
        for average, module in zip(averages, (pair.model, pair.alone), strict=True):
            for name, parameter in module.named_parameters():
                if rannc_backend.is_held(parameter):
                    old = average.get(name, torch.zeros_like(parameter))
                    average[name] = 0.9 * old + 0.1 * parameter.detach()
        for name, value in averages[0].items():
            error = float((value - averages[1][name]).abs().max())
            context.findings.that(error <= EXACT, f"average of {name}: off by {error}")
        for module in (pair.model, pair.alone):
            with torch.no_grad():
                for parameter in module.parameters():
                    if rannc_backend.is_held(parameter):
                        parameter.clamp_(-0.5, 0.5)
        states = [pair.model.state_dict(), pair.optimizers[0].state_dict()]
        if context.rank == 0:
            _compare(context, "state", states[0], pair.alone.state_dict())
            mine, theirs = states[1]["state"], pair.optimizers[1].state_dict()["state"]
            context.findings.that(mine.keys() == theirs.keys(), f"state of {sorted(mine)}")
            for index, entry in theirs.items():
                _compare(context, f"optimizer's of {index}", mine[index], entry)
    pair.optimizers[0].load_state_dict(pair.optimizers[0].state_dict())
    pair.backward(3)
    pair.step()
    pair.compare("loaded")
    everywhere.remove()


def _compare(context: Context, what: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, value in theirs.items():
        error = float((mine[name].detach() - value.detach()).abs().max())
        context.findings.that(error <= EXACT, f"{what} {name}: off by {error}")


def zero_scaled(context: Context) -> None:
    """A GradScaler: one step is skipped by all ranks, since one updater's gradient is infinite."""
    pair = Pair(context, OPTIMIZERS["sgd"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        pair.backward(step, scale=8.0 if step == 0 else scalers[0].get_scale())
        if step == 1:
            for module, here in ((pair.model, pair.updated["second.weight"]), (pair.alone, True)):
                grad = module.second.weight.grad
                if here and grad is not None:
                    grad[0, 0] = float("inf")
        for scaler, optimizer in zip(scalers, pair.optimizers, strict=True):
            if step == 0:
                scaler.scale(torch.zeros((), dtype=torch.float64))  # it makes its scale at first use
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.compare(f"step {step}")
        scales = [scaler.get_scale() for scaler in scalers]
        context.findings.that(scales[0] == scales[1], f"scales {scales}")


def zero_hooks(context: Context) -> None:
    """An optimizer for each parameter, which steps within the backward."""
    pair = Pair(context, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    for module in (pair.model, pair.alone):
        for parameter in module.parameters():
            if parameter.requires_grad:
                own = torch.optim.AdamW([parameter], lr=0.01)

                def hook(p: Tensor, own: torch.optim.Optimizer = own) -> None:
                    own.step()
                    own.zero_grad()

                parameter.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        pair.backward(step)
        pair.compare(f"step {step} within the backward")


def zero_penalty(context: Context) -> None:
    """A penalty on the parameters, beside the compiled call: every owner's autograd adds its gradient."""
    pair = Pair(context, OPTIMIZERS["adamw"])
    for step in range(3):
        pair.backward(step)
        for module in (pair.model, pair.alone):
            held = [p for p in module.parameters() if p.requires_grad and rannc_backend.is_held(p)]
            torch.stack([p.square().sum() for p in held]).sum().mul(0.1).backward()
        pair.step()
        pair.compare(f"step {step}")
    kept = [name for name, p in pair.model.named_parameters() if pair.optimizers[0].state.get(p)]
    context.findings.that(all(pair.updated[name] for name in kept), f"state of {kept}")


def zero_delayed(context: Context) -> None:
    """Reduced gradients, then such of this rank's rows alone, summed once: `delay_grad_allreduce`. In the last step
    some parameters have reduced gradients alone.
    """
    pair = Pair(context, OPTIMIZERS["sgd"])
    for step in range(4):
        for part, delays in enumerate((False, True, False) if step else (True, True, False)):
            rannc_backend.delay_grad_allreduce(delays)
            for module in (pair.model, pair.alone):
                module.is_short = step == 3 and part > 0
            pair.backward(10 * step + part)
        for name, parameter in pair.model.named_parameters():
            grad, expected = parameter.grad, dict(pair.alone.named_parameters())[name].grad
            has = pair.updated[name] and expected is not None
            context.findings.that((grad is not None) == has, f"gradient of {name}: {grad is not None}")
            if grad is not None and expected is not None:
                error = float((grad - expected).abs().max())
                context.findings.that(error <= EXACT, f"gradient of {name}: off by {error}")
        pair.step()
        pair.compare(f"step {step}")


def zero_by_hand(context: Context) -> None:
    """Updates without an optimizer reach the rank that has the gradient alone: an error, not stale values."""
    for through_data in (False, True):
        pair = Pair(context, OPTIMIZERS["sgd"])
        pair.backward(0)
        with torch.no_grad():
            for parameter in pair.model.parameters():
                if parameter.grad is not None:
                    changed = parameter.data if through_data else parameter
                    changed.sub_(0.1 * parameter.grad)
        ids = pair.ids(1)[slice(*context.interval)].clone()
        try:
            for _ in range(4):  # values are looked at one parameter at a time
                pair.compiled(ids)
            error = None
        except RanncError as found:
            error = found
        context.findings.that(
            type(error).__name__ == "StaleParameterError" and "zero_stage" in str(error),
            f"by hand{' through .data' if through_data else ''}: {error!r}",
        )


def zero_coupled(context: Context) -> None:
    """An optimizer that couples parameters goes without ZeRO where it is known, and is refused afterwards."""

    def lbfgs(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for p in module.parameters() if p.requires_grad], lr=0.1, max_iter=2)

    pair = Pair(context, lbfgs)
    ids = pair.ids(0)
    for function, optimizer, batch in (
        (pair.compiled, pair.optimizers[0], ids[slice(*context.interval)].clone()),
        (pair.alone, pair.optimizers[1], ids),
    ):

        def closure(function: Any = function, optimizer: Any = optimizer, batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = function(batch)
            loss.backward()
            return loss

        if function is pair.compiled:
            closure()
        optimizer.step(closure)
    pair.compare("L-BFGS")
    context.findings.that(all(pair.updated.values()), "ZeRO with L-BFGS")
    later = Pair(context, OPTIMIZERS["sgd"])
    later.backward(0)
    context.findings.raises(
        "L-BFGS afterwards", ("CoupledOptimizerError",), lambda: lbfgs(later.model).step(lambda: 0.0)
    )  # type: ignore[arg-type, return-value]


def zero_replanned(context: Context) -> None:
    """Planned anew after `undeploy`, with state and maybe another level of ZeRO."""
    pair, then = Pair(context, OPTIMIZERS["adamw"]), context.case.parameters["then"]
    for step in range(4):
        pair.backward(step)
        pair.step()
        pair.compare(f"step {step}")
        if step == 1:
            rannc_backend.undeploy(pair.model)
            torch._dynamo.reset()
            pair.compiled = context.compile(pair.model, zero_stage=then)
    context.findings.that(pair.has_others == (then > 0), f"level {then}: divided {pair.has_others}")
    kept = [name for name, p in pair.model.named_parameters() if pair.optimizers[0].state.get(p)]
    context.findings.that(all(pair.updated[name] for name in kept), f"state of {kept}")
