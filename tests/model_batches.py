"""Batches that the models of tests/models.py share.

In: rows, a generator, a dtype. Out: inputs by name. Terms as in model_entry.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.model_entry import Batch
from tests.models_rannc import IGNORED, VOCABULARY


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers that are the same, rounded, in every dtype."""
    # Drawn in float64 and cast, so that float32 and float64 runs see the same numbers.
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def regression(width_in: int, width_out: int | None = None) -> Any:
    """Rows `x` and `target` of these widths."""

    def make(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        return {
            "x": normal(generator, rows, width_in, dtype=dtype),
            "target": normal(generator, rows, width_out or width_in, dtype=dtype),
        }

    return make


def tokens(length: int, *, target_width: int) -> Any:
    """Rows of tokens `x`, and `target` of this width for each."""

    def make(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        return {
            "x": torch.randint(VOCABULARY, (rows, length), generator=generator),
            "target": normal(generator, rows, length, target_width, dtype=dtype),
        }

    return make


def labelled_tokens(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """Tokens `x` and `labels`, some of them ignored."""
    labels = torch.randint(VOCABULARY, (rows, 5), generator=generator)
    # Row r keeps 1 + (r mod 5) labels: every micro-batch has another share of ignored ones.
    padding = torch.arange(5).unsqueeze(0) > (torch.arange(rows) % 5).unsqueeze(1)
    return {
        "x": torch.randint(VOCABULARY, (rows, 5), generator=generator),
        "labels": labels.masked_fill(padding, IGNORED),
    }
