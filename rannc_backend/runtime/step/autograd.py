"""Ties a graph to the user's autograd: the one torch.autograd.Function of the package.

In: the user's tensors of a call. Out: flat outputs; those that can be differentiated lead back, on
``backward()``, to `GraphRuntime.backward`. Gradients of parameters do not pass through autograd: they are
published in ``p.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.graph_settings import TrainingStep
from rannc_backend.runtime.torch_internals import backward_keeps_graph


class _Step(torch.autograd.Function):
    """One training step; ``holder`` receives the outputs that are not tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        runtime: GraphRuntime,
        user_tensors: Sequence[torch.Tensor],
        holder: list[Any],
        anchor: torch.Tensor,
        *differentiable_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        outputs, step = runtime.forward(runtime.begin(user_tensors, training=True))
        ctx.runtime, ctx.step = runtime, step
        ctx.positions = [
            i
            for i, spec in enumerate(runtime.outputs)
            if spec.differentiable and isinstance(outputs[i], torch.Tensor)
        ]
        ctx.num_outputs = len(outputs)
        ctx.set_materialize_grads(False)
        # Autograd's own error for a second backward without retain_graph comes from reading a saved tensor.
        ctx.save_for_backward(anchor)
        holder.extend(outputs)
        return tuple(outputs[i] for i in ctx.positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            # torch's `once_differentiable` would say nothing, and the second derivative would be missing in
            # the result.
            raise UnsupportedModelError(
                "a backward with create_graph=True reached the compiled model, whose gradients have no "
                "derivatives",
                cure="compute what is differentiated twice (a gradient penalty, a Hessian) with a model that "
                "is not compiled.",
            )
        runtime: GraphRuntime = ctx.runtime
        step: TrainingStep | None = ctx.step
        if step is None:
            _ = ctx.saved_tensors
        assert step is not None, "autograd lets a second backward pass"
        by_output: list[torch.Tensor | None] = [None] * ctx.num_outputs
        for position, grad in zip(ctx.positions, grads, strict=True):
            by_output[position] = grad
        keep = backward_keeps_graph() or runtime.switches.keep_graph
        input_gradients = runtime.backward(step, by_output, keep=keep)
        if not keep:
            ctx.step = None
        return (None, None, None, None, *input_gradients)


def call_training(runtime: GraphRuntime, user_tensors: Sequence[torch.Tensor]) -> list[Any]:
    """A forward with autograd on: outputs of one training step, tied to their backward."""
    anchor = torch.zeros((), requires_grad=True)
    differentiable = [
        tensor for spec, tensor in zip(runtime.inputs, user_tensors, strict=True) if spec.requires_grad
    ]
    holder: list[Any] = []
    results = _Step.apply(runtime, user_tensors, holder, anchor, *differentiable)
    positions = [
        i
        for i, spec in enumerate(runtime.outputs)
        if spec.differentiable and isinstance(holder[i], torch.Tensor)
    ]
    for position, result in zip(positions, results, strict=True):
        holder[position] = result
    return holder
