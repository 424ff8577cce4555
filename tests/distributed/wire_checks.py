"""Checks of the formats in which values and gradients travel: boundary_dtype, gradient_dtype, gradient_scale; and of
how many buckets and communicators there are.

In: a context. Out: findings. Every function is collective. Terms. A *slice* is the rows of one micro-batch on one
replica. *Expected* is what one process computes slice by slice in float64 that rounds where messages would; numbers of
rows are powers of two, so that means over rows are exact. The *exact* gradient is that without any rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.kernels.pack_reference import quantize
from rannc_backend.runtime.comm import shared_memory_allreduce as sums
from rannc_backend.runtime.comm.gloo import GroupTransport
from tests.distributed.harness.context import Context

WIDTH, LENGTH, WORDS = 24, 4, 16
EXACT = 1e-12
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDOFF = {"same": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}


class Parts(nn.Module):
    """Two stages: a value with gradient and integers pass from one to the other. The loss is inside, or what it is of
    is given.
    """

    def __init__(
        self, *, ties: bool = False, outside: bool = False, rounded: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.outside = outside
        self.first = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.rounded = rounded
        if ties:
            self.head.weight = self.first[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.second(self.rounded(self.first(ids)))
        words = self.head(hidden)
        return words if self.outside else loss_of(words, ids)


def loss_of(words: Tensor, ids: Tensor) -> Tensor:
    """That of the next ids."""
    return F.cross_entropy(words.flatten(0, 1), ids.roll(1, 1).flatten())


def as_sent(x: Tensor, wire: str, *, backward: bool = False) -> Tensor:
    """A tensor of a message when it arrives."""
    wire = "bf16" if wire == "fp8" and backward else wire
    if wire == "same":
        return x
    if wire in DTYPES:
        return x.to(DTYPES[wire]).to(x.dtype)
    values, scales = quantize(x)
    groups = scales.repeat_interleave(128)[: x.numel()]
    return (values.to(torch.float32) * groups).view(x.shape).to(x.dtype)


class Sent(torch.autograd.Function):
    """A boundary between stages, in one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: str) -> Tensor:
        ctx.wire = wire
        return as_sent(x, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return as_sent(grad, ctx.wire, backward=True), None


@dataclass(slots=True)
class Sums:
    """The sums that ranks have started: (dtype, elements, communicator)."""

    started: list[tuple[torch.dtype, int, int]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    in_shared_memory: int = 0


@contextlib.contextmanager
def watched(*, fewest_bytes: int | None = None) -> Iterator[Sums]:
    """Note the sums over gloo and the bytes of messages; ``fewest_bytes``: of buckets that are summed in shared memory."""
    found, start_sum, isend, add_up = Sums(), GroupTransport._start_sum, GroupTransport.isend, sums.add_up

    def summing(self: Any, tensor: Tensor, group: Any, ranks: Any, takers: Any = ()) -> Any:
        numbers = [number for (_, number), each in self._reductions.items() if each is group]
        found.started.append((tensor.dtype, tensor.numel(), numbers[0] if numbers else -1))
        return start_sum(self, tensor, group, ranks, takers)

    def sending(self: Any, tensor: Tensor, peer: int, channel: str) -> Any:
        found.sent[channel] = found.sent.get(channel, 0) + tensor.nbytes
        return isend(self, tensor, peer, channel)

    def adding(*arguments: Any, **named: Any) -> None:
        found.in_shared_memory += 1
        add_up(*arguments, **named)

    with (
        mock.patch.object(GroupTransport, "_start_sum", summing),
        mock.patch.object(GroupTransport, "isend", sending),
        mock.patch.object(sums, "add_up", adding),
        mock.patch.object(sums, "_FEWEST_BYTES", fewest_bytes or sums._FEWEST_BYTES),
    ):
        yield found


class Job:
    """A model under the backend, and what is expected of it."""

    def __init__(self, context: Context, **options: Any) -> None:
        self.context, self.options = context, {**context.case.options, **options}
        self.ties = bool(context.case.parameters.get("ties"))
        self.replicas = max(map(int, context.case.replicas.split(",")))
        self.boundary = self.options.get("boundary_dtype", "same") if "," in context.case.replicas else "same"
        self.wire = self.options.get("gradient_dtype", "same")
        self.scale = self.options.get("gradient_scale", 1.0)
        self.outside = bool(context.case.parameters.get("outside"))
        # With the loss outside, that of a rank is the mean over its rows: "sum" adds those of all ranks up.
        self.factor = context.case.world if self.options.get("gradients_reduce_method") == "sum" else 1
        self.model, alone, self.compiled, _ = context.pair(
            lambda: Parts(ties=self.ties, outside=self.outside).double(), **options
        )
        self.alone = Parts(ties=self.ties, rounded=lambda x: Sent.apply(x, self.boundary)).double()
        self.alone.load_state_dict(alone.state_dict())
        self.exact_model = Parts(ties=self.ties).double()
        self.exact_model.load_state_dict(alone.state_dict())

    def ids(self, seed: int) -> Tensor:
        rows = sum(self.context.case.local_rows)
        return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))

    def loss(self, seed: int) -> Tensor:
        """Of this rank's rows, which is that of all."""
        ids = self.ids(seed)[slice(*self.context.interval)].clone()
        return loss_of(self.compiled(ids), ids) if self.outside else self.compiled(ids)

    def by_replica(self, seed: int, model: nn.Module | None = None) -> dict[str, list[Tensor]]:
        """The gradients that each replica sums over its micro-batches."""
        ids = self.ids(seed)
        micro_batches = ids.tensor_split(self.context.case.num_micro_batches)
        slices = [part for each in micro_batches for part in each.tensor_split(self.replicas)]
        model = model or self.alone
        found: dict[str, list[Tensor]] = {
            name: [torch.zeros_like(p) for _ in range(self.replicas)] for name, p in model.named_parameters()
        }
        for number, rows in enumerate(slices):
            model.zero_grad()
            (self.factor * model(rows) * (len(rows) / len(ids))).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[name][number % self.replicas] += parameter.grad
        return found

    def expected(self, seed: int, parts: dict[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
        """Each gradient, of two replicas or one: then the order of a sum does not matter."""
        found = {}
        for name, each in (parts or self.by_replica(seed)).items():
            if len(each) == 1 or self.wire == "same":
                found[name] = sum(each[1:], each[0])
                continue
            dtype = DTYPES[self.wire]
            narrow = [(part * self.scale).to(dtype) for part in each]
            found[name] = sum(narrow[1:], narrow[0]).double() / self.scale
        return found

    def bound(self, seed: int, num_terms: int) -> dict[str, Tensor]:
        """What rounding of ``num_terms`` terms, and of their sum after each, may change each element."""
        roundoff = ROUNDOFF[self.wire]
        # Both uses of a tied weight are terms: they may cancel.
        apart = Parts(rounded=self.alone.rounded).double()
        apart.load_state_dict(self.alone.state_dict())
        sizes = {
            name: sum((part.abs() for part in parts), torch.zeros(()))
            for name, parts in self.by_replica(seed, apart).items()
        }
        if self.ties:
            sizes["first.0.weight"] = sizes["first.0.weight"] + sizes.pop("head.weight")
        factor = (1 + roundoff) ** (num_terms + 1) - 1
        return {name: factor * size + EXACT for name, size in sizes.items()}

    def compare(self, what: str, expected: dict[str, Tensor], bound: dict[str, Tensor] | None = None) -> int:
        """Note gradients that are off by more than their bound, or by more than next to nothing; gives how many there
        are.
        """
        number = 0
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            number += 1
            off = (parameter.grad - expected[name]).abs()
            allowed = EXACT * expected[name].abs().max() if bound is None else bound[name]
            self.context.findings.that(
                bool((off <= allowed).all()), f"{what}: {name} is off by {float(off.max()):.3g}"
            )
            self.context.findings.that(
                parameter.grad.dtype == parameter.dtype, f"{name}: {parameter.grad.dtype}"
            )
        return number


def wires_equal_rounding_in_one_process(context: Context) -> None:
    """Gradients of two replicas, or values between two stages, are those of one process that rounds at the same places.

    Parameters: ties; shared: sums go through shared memory.
    """
    job = Job(context)
    with watched(fewest_bytes=1 if context.case.parameters.get("shared") else None) as found:
        for step in range(2):
            job.model.zero_grad()
            loss = job.loss(step)
            loss.backward()
            job.compare(f"step {step}", job.expected(step))
            reference = job.alone(job.ids(step)).detach() if job.boundary != "fp8" else None
            if reference is not None and not job.outside:
                context.findings.that(
                    float((loss.detach() - reference).abs()) <= EXACT * float(reference), f"loss {loss}"
                )
    rounded = job.expected(0)
    exact = {name: sum(parts[1:], parts[0]) for name, parts in job.by_replica(0, job.exact_model).items()}
    changed = any(not torch.equal(rounded[name], exact[name]) for name in exact)
    is_rounded = job.boundary != "same" or (job.wire != "same" and job.replicas > 1)
    context.findings.that(changed == is_rounded, "rounding changes nothing here: the check is worth nothing")
    wanted = DTYPES.get(job.wire, torch.float64)
    if job.replicas > 1:
        sums_of_gradients = [dtype for dtype, numel, _ in found.started if numel > WIDTH]
        shared = context.case.parameters.get("shared")
        context.findings.that(
            bool(found.in_shared_memory) == bool(shared), f"{found.in_shared_memory} shared"
        )
        context.findings.that(
            bool(shared) or (wanted in sums_of_gradients and set(sums_of_gradients) == {wanted}),
            f"sums in {sums_of_gradients}",
        )
    context.findings.that(_boundary_bytes(job, found) in (None, True), f"messages of {found.sent}")


def _boundary_bytes(job: Job, found: Sums) -> bool | None:
    """Whether the messages between the stages have the size that their formats make, over two steps."""
    rows = sum(job.context.case.local_rows)
    sent = {name: size for name, size in found.sent.items() if name in ("0>1 F", "1>0 B")}
    if not sent or job.replicas > 1:
        return None
    elements = 2 * rows * LENGTH * WIDTH
    ids = 2 * rows * LENGTH * 8
    item = {"same": 8, "bf16": 2, "fp16": 2, "fp8": 1}[job.boundary]
    back = {"fp8": 2}.get(job.boundary, item)
    forward = elements * item + ids + (elements // 32 if job.boundary == "fp8" else 0)
    expected = forward if job.context.rank == 0 else elements * back
    number = 2 * job.context.case.num_micro_batches
    return all(expected <= size <= expected + 3 * 128 * number for size in sent.values())


def wires_within_their_bound(context: Context) -> None:
    """Gradients of any number of replicas, tied or not, are within what rounding may change; parameters stay alike."""
    job = Job(context)
    ranks = len(context.case.local_rows)
    optimizer = torch.optim.SGD(job.model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        job.loss(step).backward()
        job.compare(f"step {step}", _exact(job, step), job.bound(step, ranks))
        optimizer.step()
        job.alone.load_state_dict(job.model.state_dict())  # whole: the case has states_on_all_ranks


def _exact(job: Job, seed: int) -> dict[str, Tensor]:
    return {name: sum(parts[1:], parts[0]) for name, parts in job.by_replica(seed).items()}


def wires_overflow(context: Context) -> None:
    """What is beyond float16 becomes infinite in p.grad, and a GradScaler skips the step on every rank."""
    job = Job(context)
    before = {
        name: p.detach().clone() for name, p in job.model.named_parameters() if rannc_backend.is_held(p)
    }
    optimizer = torch.optim.SGD(job.model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1)
    scaler.scale(job.loss(0)).backward()
    grads = [p.grad for p in job.model.parameters() if p.grad is not None]
    seen = any(bool(grad.isinf().any()) for grad in grads)
    context.findings.that(seen or not grads, "no gradient is infinite")
    scaler.step(optimizer)
    scaler.update()
    context.findings.that(scaler.get_scale() == 2.0**29, f"the scale is {scaler.get_scale()}")
    for name, parameter in job.model.named_parameters():
        if name in before:
            context.findings.that(torch.equal(parameter, before[name]), f"{name} has been updated")


def wires_delayed(context: Context) -> None:
    """Gradients of two calls, summed over replicas once in the narrow dtype."""
    job = Job(context)
    total: dict[str, list[Tensor]] = {}
    for seed, delays in ((0, True), (1, False)):
        rannc_backend.delay_grad_allreduce(delays)
        job.loss(seed).backward()
        for name, parts in job.by_replica(seed).items():
            earlier = total.get(name, [torch.zeros_like(part) for part in parts])
            total[name] = [part + before for part, before in zip(parts, earlier, strict=True)]
    job.compare("delayed", job.expected(0, total))


def wires_in_turn(context: Context) -> None:
    """Buckets go round robin over communicators, and there are no more of them than asked for; results are exact.

    Parameters: number: of buckets that this rank reduces in a step.
    """
    job = Job(context)
    with watched() as found:
        for step in range(2):
            job.model.zero_grad()
            job.loss(step).backward()
            job.compare(f"step {step}", job.expected(step))
    number, wanted = context.case.parameters["number"], job.options.get("num_communicators", 1)
    turns = [turn for _, numel, turn in found.started if numel >= WIDTH]
    context.findings.that(len(turns) == 2 * number, f"{len(turns)} sums of gradients in two steps")
    context.findings.that(
        turns == [place % wanted for place in range(len(turns))], f"communicators in the order {turns}"
    )
