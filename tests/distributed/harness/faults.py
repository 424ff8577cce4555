"""Planted faults: change the runtime of one worker group so that its results are wrong, to see the comparison fail.

In: the fault's name and this rank. Out: nothing; functions of the runtime are replaced in this process. "" plants nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def _scaled_gradient(rank: int) -> None:
    """One parameter's gradient on each rank is 0.1 % too large; needs nothing of the backend."""
    backward = torch.Tensor.backward

    def patched(self: torch.Tensor, *arguments: object, **keywords: object) -> None:
        before = {id(t) for t in _leaves_with_gradient()}
        backward(self, *arguments, **keywords)
        fresh = [t for t in _leaves_with_gradient() if id(t) not in before]
        if fresh:
            fresh[0].grad.mul_(1.001)

    torch.Tensor.backward = patched  # type: ignore[method-assign]


def _leaves_with_gradient() -> list[torch.Tensor]:
    import gc

    return [t for t in gc.get_objects() if type(t) is torch.nn.Parameter and t.grad is not None]


FAULTS: Mapping[str, Callable[[int], None]] = {"scaled_gradient": _scaled_gradient}


def install_fault(name: str, rank: int) -> None:
    """Plant a fault for the rest of this process."""
    if name:
        FAULTS[name](rank)
