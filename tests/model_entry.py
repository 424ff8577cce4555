"""What a test needs to know about one model: how to build it, feed it, read its outputs, and how exact it can
be.

In: functions that build modules and batches. Out: `Entry`. Terms: *rows* are samples; a *batch* is a dict of
tensors by name; *outside* names belong to the loss outside of the model and are not passed to it;
*replicated* names have no rows; *batch statistics* are those of BatchNorm: such a model is computed slice by
slice (micro-batch on one replica).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
EXACT = 1e-12
# For models that compute a part in float32 themselves, whatever the dtype of their parameters.
FLOAT32_INSIDE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the tests.

    Args:
        build: dtype -> module, in training mode; called right after torch.manual_seed.
        make_batch: (rows, generator, dtype) -> batch; floating tensors in dtype.
        loss_of: (outputs, batch) -> scalar to differentiate.
        loss_inside: the scalar is an output of the model, computed over the global batch.
        rows_of: outputs -> values that come back row by row, by name.
        scalars_of: outputs -> further scalar outputs, by name.
        positional: batch names passed by position, in this order; the others go by keyword.
        tolerance: bound of the relative error in float64.
        deep: has enough layers with parameters to be cut into four stages that each own some.
        shared: parameter names that several stages may own.
        adam_epsilon: AdamW's eps; large where rounding noise of a zero gradient would be normalised to full
        steps.
    """

    name: str
    build: Callable[[torch.dtype], nn.Module]
    make_batch: Callable[[int, torch.Generator, torch.dtype], Batch]
    loss_of: Callable[[Any, Batch], Tensor]
    loss_inside: bool = False
    rows_of: Callable[[Any], Mapping[str, Tensor]] = lambda outputs: {"output": outputs}
    scalars_of: Callable[[Any], Mapping[str, Tensor]] = lambda outputs: {}
    positional: tuple[str, ...] = ("x",)
    outside: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    tolerance: float = EXACT
    deep: bool = False
    shared: frozenset[str] = frozenset()
    batch_statistics: bool = False
    trains: bool = True
    adam_epsilon: float = 1e-8

    def model(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """The module with random weights that depend on the seed only."""
        torch.manual_seed(seed)
        return self.build(dtype)

    def batch(self, rows: int, seed: int, dtype: torch.dtype) -> Batch:
        """A batch of that many rows that depends on rows and seed only."""
        return self.make_batch(rows, torch.Generator().manual_seed(seed), dtype)

    def slice(self, batch: Batch, start: int, stop: int) -> Batch:
        """Rows start to stop of a batch; replicated tensors whole."""
        return {name: v if name in self.replicated else v[start:stop] for name, v in batch.items()}

    def call(self, model: Callable[..., Any], batch: Batch) -> Any:
        """The model's outputs for a batch."""
        keywords = {n: v for n, v in batch.items() if n not in self.positional and n not in self.outside}
        return model(*(batch[name] for name in self.positional), **keywords)
