"""Checks of models with several outputs of which a step differentiates some: what others alone are computed from has no
gradient, as in one process, and no weight decay or momentum acts on it.

In: a context. Out: findings. The reference is one process on the batches of all ranks, which are of one size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend
from tests.distributed.harness.context import Context
from tests.distributed.loop_checks import WIDTH

ROWS = 12
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Heads(nn.Module):
    """Rows of two heads, a metric, and a loss of which a part is detached after its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right, self.probe = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.own, self.silent = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, beside: Tensor) -> Outputs:
        hidden = self.first(x).tanh()
        deep = self.second(hidden).tanh()
        metric = (self.probe(hidden) + beside).square().mean()
        loss = self.own(deep).square().mean() + self.silent(deep).square().mean().detach()
        return self.left(deep), self.right(deep).tanh(), metric, loss


def _of_each(outputs: Outputs, own: bool, rank: int) -> Tensor:
    """Each rank differentiates another head. In one process: the mean over ranks of what each of them does."""
    if own:
        return outputs[rank % 2].square().mean()
    parts = [each.square() for each in outputs[:2]]
    return torch.cat([parts[number % 2].chunk(rank)[number] for number in range(rank)]).mean()


#: what a step differentiates, by the outputs, whether they are a rank's own, and the rank, or their number in one process
STEPS: Sequence[Callable[[Outputs, bool, int], Tensor]] = (
    lambda outputs, own, rank: outputs[3],
    lambda outputs, own, rank: outputs[0].square().mean(),
    lambda outputs, own, rank: outputs[3] * 0.5 + outputs[2],
    lambda outputs, own, rank: outputs[2],
    _of_each,
    lambda outputs, own, rank: outputs[1].square().mean(),
    lambda outputs, own, rank: outputs[3],
)


def some_outputs(context: Context) -> None:
    """Steps of one run that differentiate different outputs: gradients that there are, and parameters after each."""
    compare_steps(context, Heads, STEPS, partial(two_inputs, context))


def compare_steps(
    context: Context,
    make: Callable[[], nn.Module],
    steps: Sequence[Callable[[Any, bool, int], Tensor]],
    inputs: Callable[[int], list[Tensor]],
) -> None:
    """Compare steps that differentiate what `steps` says with those of one process on all ranks' rows: which gradients
    there are, of parameters and inputs, their values, and parameters after AdamW's step, which none leaves alone.
    """
    torch.manual_seed(context.case.seed)
    model = make().to(context.dtype)
    alone = copy.deepcopy(model)
    compiled = context.compile(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.3) for each in (model, alone)]
    for number, differentiated in enumerate(steps):
        whole = inputs(number)
        mine = [x.chunk(context.case.world)[context.rank].clone() for x in whole]
        for x in (*whole, *mine):
            x.requires_grad_(x.is_floating_point())
        for optimizer in optimizers:
            optimizer.zero_grad()
        differentiated(compiled(*mine), True, context.rank).backward()
        differentiated(alone(*whole), False, context.case.world).backward()
        _compare_inputs(context, f"step {number}", mine, whole)
        _compare_gradients(context, f"step {number}", model, alone)
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in alone.named_parameters():
            if rannc_backend.is_held(held := model.get_parameter(name)):
                context.findings.close(
                    f"step {number}", name, held.detach(), parameter.detach(), 10 * context.tolerance
                )


def two_inputs(context: Context, seed: int) -> list[Tensor]:
    """Rows of all ranks."""
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=numbers, dtype=context.dtype) for _ in range(2)]


def _compare_inputs(context: Context, what: str, mine: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    """Whether there is a gradient of each. Their values, of a rank's own loss or of the global one, are checked elsewhere."""
    found, wanted = ([x.grad is not None for x in inputs] for inputs in (mine, whole))
    context.findings.that(found == wanted, f"{what}: gradients of inputs {found}, not {wanted}")


def _compare_gradients(context: Context, what: str, model: nn.Module, alone: nn.Module) -> None:
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    held = [name for name, p in model.named_parameters() if rannc_backend.is_held(p)]
    found = context.compare_gradients(model, wanted, kind=f"{what}: gradient")
    missing = sorted(set(wanted) & set(held) - set(found))
    owners_alone = bool(context.case.options.get("zero_stage"))
    context.findings.that(owners_alone or not missing, f"{what}: no gradient of {missing}")
