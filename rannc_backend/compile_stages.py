"""Compile one stage graph into callables for forward, backward and inference.

In: a `StageGraph` (functional ATen ops on fakes with one symbol `rows`), which values need a gradient, the compiler.
Out: a `CompiledStage`, which runs on real tensors of any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import Tensor

from rannc_backend.passes.split_stages import StageInput, StageOutput

Saved = tuple[Any, ...]
"""What forward keeps for backward: a plain tuple of tensors and ints."""

ParameterSink = Callable[[int, Tensor], None]
"""Called with the position of a parameter among the stage's inputs and its gradient."""


class CompiledStage:
    """Forward, backward and inference of one stage; see the module docstring."""

    inputs: tuple[StageInput, ...]
    outputs: tuple[StageOutput, ...]
    grad_outputs: tuple[int, ...]
    """Positions of the outputs whose gradients `backward` takes, in this order."""
    grad_inputs: tuple[int, ...]
    """Positions of the inputs, other than parameters, whose gradients `backward` returns, in this order."""
    grad_parameters: tuple[int, ...]
    """Positions of the parameters whose gradients go to the sink."""
    saved_bytes: sympy.Expr

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        """Outputs by `outputs`, and what `backward` needs."""
        raise NotImplementedError

    def backward(self, saved: Saved, grads: Sequence[Tensor], parameter_sink: ParameterSink) -> list[Tensor]:
        """Gradients by `grad_inputs`; each parameter gradient goes to `parameter_sink(position, gradient)`."""
        raise NotImplementedError

    def infer(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Outputs by `outputs`; nothing is saved."""
        raise NotImplementedError
