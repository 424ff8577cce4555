"""Checks of the option gradient_accumulation_dtype: gradients of 16 bits that are summed in float32 and rounded once.

In: a context. Out: findings. Every function is collective. Terms. A *slice* is the rows of one micro-batch on one
replica. The *exact sum* is that of the slices' gradients, each as one process computes it in 16 bits, in float64: what
is off from it is rounding of sums alone. Numbers of rows are powers of two, so that means over rows are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from tests.distributed.harness.context import Context

WIDTH, LENGTH, WORDS = 8, 4, 16
SCALE = 2.0**7
# Roundings of exact sums. A sum in float32 may lie on the other side of a middle; kernels of Inductor keep more bits
# within a slice than one process.
ONCE, ONCE_COMPILED = 1.02, 1.3


class Narrow(nn.Module):
    """A loss inside; the last layer has a weight of its own, or the first one's (`ties`)."""

    def __init__(self, *, ties: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.table(ids)))))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.roll(1, 1).flatten())


class Job:
    """A model of 16 bits under the backend, and the exact sums of its gradients."""

    def __init__(self, context: Context, **options: Any) -> None:
        self.context = context
        parameters = context.case.parameters
        self.dtype = getattr(torch, parameters.get("dtype", "bfloat16"))
        ties = bool(parameters.get("ties"))

        def make() -> nn.Module:
            return Narrow(ties=ties).to(self.dtype)

        self.model, alone, self.compiled, _ = context.pair(make, **options)
        # Both uses of a tied weight are terms of the exact sum.
        self.alone = Narrow().to(self.dtype)
        self.alone.load_state_dict(alone.state_dict())
        self.ties = ties

    def ids(self, seed: int) -> Tensor:
        rows = sum(self.context.case.local_rows)
        return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))

    def loss(self, seed: int) -> Tensor:
        """Of this rank's rows, which is that of all."""
        return self.compiled(self.ids(seed)[slice(*self.context.interval)].clone())

    def exact(self, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
        """The exact sums, of the loss times ``scale``."""
        case, ids = self.context.case, self.ids(seed)
        num_slices = case.num_micro_batches * int(case.replicas.split(",")[0])
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.alone.named_parameters()}
        for rows in ids.chunk(num_slices):
            self.alone.zero_grad()
            (self.alone(rows) * (scale / num_slices)).backward()
            for name, parameter in self.alone.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.double()
        if self.ties:
            total["table.weight"] += total.pop("head.weight")
        return total

    def error(self, expected: Mapping[str, Tensor]) -> float:
        """How far this rank's gradients together are from the exact sums, in multiples of what one rounding of those
        is off; 0 without a gradient.
        """
        pairs = [
            (p.grad.double().flatten(), expected[name].flatten())
            for name, p in self.model.named_parameters()
            if p.grad is not None
        ]
        same = all(p.grad.dtype == p.dtype for p in self.model.parameters() if p.grad is not None)
        self.context.findings.that(same, "gradients have another dtype than their parameters")
        if not pairs:
            return 0.0
        mine, truth = (torch.cat(side) for side in zip(*pairs, strict=True))
        return float((mine - truth).norm() / (truth.to(self.dtype).double() - truth).norm())

    def has_any(self) -> bool:
        """Whether this rank has a gradient."""
        return any(p.grad is not None for p in self.model.parameters())


def _check(job: Job, what: str, error: float, bound: float = ONCE) -> None:
    job.context.findings.worst[what] = error
    job.context.findings.that(error <= bound, f"{what}: off by {error:.2f} roundings, more than {bound:.2f}")


def accumulation_rounds_once(context: Context) -> None:
    """A step's gradients are exact but for one rounding; without the option, each slice rounds."""
    job = Job(context)
    for step in range(2):
        job.model.zero_grad()
        job.loss(step).backward()
        expected = job.exact(step)
        compiled = context.case.stage_compiler == "inductor"
        _check(job, f"step {step}", job.error(expected), ONCE_COMPILED if compiled else ONCE)
    default = Job(context, gradient_accumulation_dtype="none")
    default.loss(0).backward()
    error = default.error(default.exact(0))
    context.findings.that(
        error > 2 or not default.has_any(), f"without the option the error is {error:.2f} roundings"
    )


def accumulation_scaled(context: Context) -> None:
    """A scaled loss, as a GradScaler's: gradients before it is known, and after."""
    job = Job(context)
    for step, scale in enumerate((SCALE, SCALE, SCALE / 4)):
        job.model.zero_grad()
        (job.loss(step) * scale).backward()
        _check(job, f"step {step}", job.error(job.exact(step, scale)))
    if job.dtype == torch.float16:
        return  # GradScaler refuses such gradients
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizer.zero_grad()
    scaler.scale(job.loss(7)).backward()
    scaler.unscale_(optimizer)
    _check(job, "unscaled", job.error(job.exact(7)))


def accumulation_published(context: Context) -> None:
    """Two backwards of one forward, hooks, and sums over calls: `p.grad` is the parameter's dtype's."""
    job = Job(context)
    loss = job.loss(0)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in job.model.named_parameters() if p.grad is not None}
    _check(job, "retained", job.error(job.exact(0)))
    loss.backward()
    for name, parameter in job.model.named_parameters():
        if name in once and parameter.grad is not None:
            context.findings.that(torch.equal(parameter.grad, 2 * once[name]), f"{name}: not twice the first")
    job.model.zero_grad()
    expected: dict[str, Tensor] = {}
    for seed in (1, 2):
        job.loss(seed).backward()
        found = job.exact(seed)
        expected = {name: value + expected.get(name, 0.0) for name, value in found.items()}
    # Once for the first call, which is smaller than the sum mostly, and once for both.
    _check(job, "two calls", job.error(expected), 2)
    seen: list[torch.dtype] = []
    for parameter in job.model.parameters():
        if rannc_backend.is_held(parameter):
            parameter.register_hook(lambda grad: seen.append(grad.dtype))
    job.model.zero_grad()
    job.loss(3).backward()
    _check(job, "with hooks", job.error(job.exact(3)))
    context.findings.that(set(seen) <= {job.dtype}, f"hooks see {set(seen)}")
    context.findings.that(bool(seen), "no hook was called")


def accumulation_delayed(context: Context) -> None:
    """Gradients of this rank's rows over two calls, then summed over replicas in float32."""
    job = Job(context)
    expected: dict[str, Tensor] = {}
    for seed, delays in ((0, True), (1, False)):
        rannc_backend.delay_grad_allreduce(delays)
        job.loss(seed).backward()
        found = job.exact(seed)
        expected = {name: value + expected.get(name, 0.0) for name, value in found.items()}
    # Each rank has rounded its own sum after each call, and the whole is rounded.
    _check(job, "delayed", job.error(expected), 2)


def accumulation_verified(context: Context) -> None:
    """With verify_recomp nothing differs beyond what the parameter's dtype tells apart."""
    job = Job(context)
    job.loss(0).backward()
    _check(job, "verified", job.error(job.exact(0)))
