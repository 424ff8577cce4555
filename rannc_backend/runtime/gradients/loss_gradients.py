"""The gradients that a backward starts from, one number each for the whole job, without waiting for a device.

In: this rank's gradients of the scalar outputs. Out: their means over ranks, and what a step makes of them.
On a CPU they are Python numbers, which travel with the agreement that all ranks hold anyway. A device that
runs behind the host must not be asked for a value: the host would stand still until the device has done
everything, and then the device until the host has queued the next step. There they are tensors (float64, no
dimensions), their mean is one more all-reduce, and what depends on a value is decided on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rannc_backend.kernels.scale_unless_one import scale_unless_one

Number = float | torch.Tensor
"""A number, or a tensor of no dimensions on the device whose value the host does not know."""


def means_on_device(
    grads: Sequence[torch.Tensor | None],
    all_reduce: Callable[[torch.Tensor], None] | None,
    num_ranks: int,
    device: torch.device,
) -> list[Number]:
    """Mean over all ranks of each rank's gradients; None counts as zero, and so does one that is not a single
    number.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    given = [
        grad.detach().reshape(()).double() if grad is not None and grad.numel() == 1 else zero
        for grad in grads
    ]
    total = torch.stack(given)
    if all_reduce is not None:
        all_reduce(total)
        total = total / num_ranks
    return list(total.unbind())


def ratio(number: Number, other: Number) -> Number:
    """``number / other``, and 1 for equal ones: both may be zero or infinite."""
    if isinstance(number, torch.Tensor) or isinstance(other, torch.Tensor):
        quotient = torch.as_tensor(number / other)
        return torch.where(torch.as_tensor(number == other), torch.ones_like(quotient), quotient)
    return 1.0 if number == other else number / other


def if_within(number: Number, low: float, high: float, otherwise: Number) -> Number:
    """``number`` if its absolute value lies between the bounds, else ``otherwise``."""
    if isinstance(number, torch.Tensor):
        size = number.abs()
        return torch.where((low < size) & (size < high), number, otherwise)
    return number if low < abs(number) < high else otherwise


def filled_like(tensor: torch.Tensor, number: Number) -> torch.Tensor:
    """``number`` everywhere, in the shape and dtype of ``tensor``; beyond the dtype's range it becomes
    infinite, as in torch's backward.
    """
    if isinstance(number, torch.Tensor):
        return number.to(tensor.dtype).expand(tensor.shape)
    return torch.full_like(tensor, number, dtype=torch.float64).to(tensor.dtype)


def scale_buffers(buffers: Sequence[torch.Tensor], scale: Number) -> None:
    """Multiply flat buffers in place; a scale of 1 costs no pass over them."""
    if isinstance(scale, torch.Tensor):
        scale_unless_one(buffers, scale)
    elif scale != 1.0:
        for buffer in buffers:
            buffer.mul_(scale)
