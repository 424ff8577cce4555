"""Planted faults: change the runtime of one worker group so that its results are wrong, to see the comparison
fail.

In: the fault's name. Out: nothing; methods of the runtime are replaced in this process. "" plants nothing.
The product has no hooks for this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

SCALE = 1.001


def _scaled_leaf() -> None:
    """One gradient of the compiled model is 0.1 % too large; works with any backend.

    The reference trains in the same process and must stay right: with the same fault the two would agree
    again.
    """
    compile_model, backward = torch.compile, torch.Tensor.backward
    compiled: list[torch.nn.Module] = []

    def patched_compile(model: torch.nn.Module, **keywords: Any) -> Any:
        compiled.append(model)
        return compile_model(model, **keywords)

    def patched_backward(self: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        fresh = [p for model in compiled for p in model.parameters() if p.grad is None]
        backward(self, *arguments, **keywords)
        scaled = next((p for p in fresh if p.grad is not None), None)
        if scaled is not None:
            scaled.grad.mul_(SCALE)

    torch.compile = patched_compile
    torch.Tensor.backward = patched_backward  # type: ignore[method-assign]


def _scaled_gradients() -> None:
    """All gradients of a rank are 0.1 % too large when they are published."""
    from rannc_backend.runtime.gradients.buckets import GradientBuckets

    publish = GradientBuckets.publish

    def patched(self: Any, pending: Any, scale: Any, **options: Any) -> None:
        publish(self, pending, scale * SCALE, **options)

    GradientBuckets.publish = patched  # type: ignore[method-assign]


class _Nowhere:
    """Takes gradients and forgets them."""

    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def target(self, name: str) -> tuple[torch.Tensor, bool]:
        return torch.empty_like(self.pending.view(name)), False

    def targets(self, names: list[str]) -> tuple[list[torch.Tensor], list[bool]]:
        return [torch.empty_like(self.pending.view(name)) for name in names], [False for _ in names]

    def made(self, name: str) -> None:
        return

    def all_made(self, names: list[str]) -> None:
        return


def _dropped_gradient() -> None:
    """The parameter gradients of micro-batch 1 are thrown away."""
    from rannc_backend.runtime.step.executor import Executor

    backward = Executor._backward

    def patched(self: Any, action: Any, state: Any) -> None:
        kept = state.pending
        if action.micro_batch == 1:
            state.pending = _Nowhere(kept)
        backward(self, action, state)
        state.pending = kept

    Executor._backward = patched  # type: ignore[method-assign]


def _dropped_sum() -> None:
    """The partial sums (of the loss) of micro-batch 1 are thrown away."""
    from rannc_backend.runtime.step.executor import Executor

    keep_output = Executor._keep_output

    def patched(
        self: Any, position: int, slot: Any, tensor: torch.Tensor, micro_batch: int, state: Any
    ) -> None:
        if slot.kind == "partial" and micro_batch == 1:
            tensor = torch.zeros_like(tensor)
        keep_output(self, position, slot, tensor, micro_batch, state)

    Executor._keep_output = patched  # type: ignore[method-assign]


def _swapped_message(direction: str) -> Callable[[], None]:
    """Each message of a channel delivers what the message before it on that channel should have delivered."""

    def plant() -> None:
        from rannc_backend.runtime.step.executor import Executor

        arrived = Executor._arrived
        last: dict[tuple[int, str], list[torch.Tensor]] = {}

        def patched(self: Any, action: Any, state: Any) -> list[torch.Tensor] | None:
            tensors = arrived(self, action, state)
            if (
                tensors is None
                or action.stage < 0
                or action.peer < 0
                or action.channel.direction != direction
            ):
                return tensors
            key = (id(self), str(action.channel))
            before = last.get(key, tensors)
            last[key] = [tensor.clone() for tensor in tensors]
            fits = [b.shape == t.shape for b, t in zip(before, tensors, strict=True)]
            return before if all(fits) else tensors

        Executor._arrived = patched  # type: ignore[method-assign]

    return plant


def _deaf_scaler() -> None:
    """Each rank's GradScaler looks at its own gradients only, as torch's does by itself."""
    from rannc_backend.runtime.gradients import grad_scaler

    grad_scaler._of_all_ranks = lambda found, inv_scale, world: found


def _late_seed() -> None:
    """The eager backward keeps the seed that it had, also where float16 has lost digits by it."""
    from rannc_backend.runtime.step.graph_runtime import GraphRuntime

    publish = GraphRuntime._publish_eager

    def patched(self: Any, step: Any, gradient: float, *, keep: bool) -> Any:
        self.settings = dataclasses.replace(self.settings, narrow_range=False)
        return publish(self, step, gradient, keep=keep)

    GraphRuntime._publish_eager = patched  # type: ignore[method-assign]


FAULTS: Mapping[str, Callable[[], None]] = {
    "scaled_leaf": _scaled_leaf,
    "scaled_gradients": _scaled_gradients,
    "dropped_gradient": _dropped_gradient,
    "dropped_sum": _dropped_sum,
    "swapped_values": _swapped_message("F"),
    "swapped_gradients": _swapped_message("B"),
    "deaf_scaler": _deaf_scaler,
    "late_seed": _late_seed,
}


def install_fault(name: str) -> None:
    """Plant a fault for the rest of this process."""
    if name:
        FAULTS[name]()
