"""The CTC loss of each sample as one operator: torch's own reads the lengths of all samples as numbers.

In: the arguments of `torch.ctc_loss` with lengths as tensors, on fakes. Out: the same value, by way of an operator of
`torch.library` that gives one loss per sample and whose gradient runs torch's loss once more; what reduces them is
ordinary arithmetic. Targets of all samples one after the other, as a mask selects them, are put in rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from rannc_backend.passes.plain_numbers import recording_gradients

aten = torch.ops.aten
_LIBRARY = torch.library.Library("rannc_ctc", "FRAGMENT")
_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
_NONE, _MEAN = 0, 1  # torch's numbers of reductions
_CASTS = frozenset({aten._to_copy.default, aten.detach.default, aten.clone.default})


def takes(func: object, args: Sequence[Any]) -> bool:
    """Whether this is a call of the loss with a batch [tokens, rows, classes], targets [rows, tokens], or those of all
    rows one after the other, and tensors of lengths.
    """
    tensors = args[:4]
    return (
        func in (torch.ctc_loss, torch.nn.functional.ctc_loss)
        and len(tensors) == 4
        and all(isinstance(each, Tensor) for each in tensors)
        and args[0].dim() == 3
        and args[1].dim() in (1, 2)
    )


def is_selection(func: object, args: Sequence[Any]) -> bool:
    """Whether a mask [rows, tokens] selects from values of that shape: `values[mask]`, `masked_select(values, mask)`."""
    return (
        func in (torch.masked_select, Tensor.masked_select, Tensor.__getitem__)
        and len(args) == 2
        and all(isinstance(each, Tensor) and each.dim() == 2 for each in args)
        and args[1].dtype is torch.bool
        and args[0].shape == args[1].shape
    )


def selection_behind(targets: fx.Node) -> fx.Node:
    """The node that has selected the targets, behind casts."""
    while targets.target in _CASTS:
        targets = targets.args[0]  # type: ignore[assignment]
    return targets


def counts_of(mask: fx.Node, lengths: fx.Node) -> bool:
    """Whether lengths are the numbers of selected tokens of each row."""
    lengths = selection_behind(lengths)
    if lengths.target is not aten.sum.dim_IntList or len(lengths.args) != 2:
        return False
    counted, dims = lengths.args
    return selection_behind(counted) is mask and list(dims) in ([1], [-1])  # type: ignore[arg-type]


def in_rows(values: Tensor, mask: Tensor) -> Tensor:
    """The selected values of each row, in their order, before zeros."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return torch.where(mask, values, 0).gather(1, order)


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
