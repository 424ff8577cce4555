"""The CTC loss of each sample as one operator: torch's own reads the lengths of all samples as numbers.

In: the arguments of `torch.ctc_loss` with lengths as tensors, on fakes. Out: the same value, by way of an operator of
`torch.library` that gives one loss per sample and whose gradient runs torch's loss once more; what reduces them is
ordinary arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rannc_backend.passes.plain_numbers import recording_gradients

_LIBRARY = torch.library.Library("rannc_ctc", "FRAGMENT")
_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
_NONE, _MEAN = 0, 1  # torch's numbers of reductions


def takes(func: object, args: Sequence[Any]) -> bool:
    """Whether this is a call of the loss with a batch [tokens, rows, classes], targets [rows, tokens] and tensors of
    lengths.
    """
    tensors = args[:4]
    return (
        func in (torch.ctc_loss, torch.nn.functional.ctc_loss)
        and len(tensors) == 4
        and all(isinstance(each, Tensor) for each in tensors)
        and args[0].dim() == 3
        and args[1].dim() == 2
    )


def call_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """What torch's function gives for these arguments."""
    losses = torch.ops.rannc_ctc.losses.default(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    if reduction in (_NONE, "none"):
        return losses
    if reduction in (_MEAN, "mean"):
        return (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum()


def _losses(log_probs: Tensor, *rest: Any) -> Tensor:
    targets, input_lengths, target_lengths, blank, zero_infinity = rest
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _NONE, zero_infinity)


def _forward(log_probs: Tensor, *rest: Any) -> Tensor:
    with torch.no_grad():
        return _losses(log_probs, *rest)


def _backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    with recording_gradients():
        leaf = log_probs.detach().requires_grad_()
        (found,) = torch.autograd.grad(_losses(leaf, *rest), leaf, grad)
    return found.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.rannc_ctc.losses_backward.default(grad, *ctx.saved_tensors, *ctx.settings)
    return found, None, None, None, None, None


_LIBRARY.define(f"losses({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"losses_backward(Tensor grad, {_ARGUMENTS}) -> Tensor")
_LIBRARY.impl("losses", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("losses_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rannc_ctc::losses", lambda value, *rest: value.new_empty(value.shape[1:2]), lib=_LIBRARY
)
torch.library.register_fake(
    "rannc_ctc::losses_backward", lambda grad, value, *rest: value.new_empty(value.shape), lib=_LIBRARY
)
torch.library.register_autograd("rannc_ctc::losses", _gradients, setup_context=_keep, lib=_LIBRARY)

LOSSES = torch.ops.rannc_ctc.losses.default
