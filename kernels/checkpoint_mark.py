"""The mark of a tensor that is kept where a model recomputes all but what it marks.

In: any tensor, in a model's forward. Out: the same tensor. Outside of a graph nothing happens; in a graph the mark is an
operator, `rannc::checkpoint_tensor`, which the backend takes out of it again (`passes.stage.recompute`). Reference: the
operator gives a copy with the same strides, and its gradient is that of the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("rannc", "FRAGMENT")
_LIBRARY.define("checkpoint_tensor(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))


def _copied(x: Tensor) -> Tensor:
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.clone()
    # Elements that lie in memory once and are seen several times stay so.
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def _as_shown(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient


_LIBRARY.impl("checkpoint_tensor", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("rannc::checkpoint_tensor", _as_shown, lib=_LIBRARY)
torch.library.register_autograd("rannc::checkpoint_tensor", _gradient, lib=_LIBRARY)
MARK = torch.ops.rannc.checkpoint_tensor.default


def checkpoint_tensor(x: Tensor) -> Tensor:
    """Marks a tensor of a model's forward that is kept under the option ``recompute="marked"``.

    With that option the backward computes all other values again, from one marked tensor to the next. With other options,
    and without the backend, nothing changes.

    Args:
        x: A tensor that the forward computes. Use what is returned in its place.

    Returns:
        ``x``, which is the same tensor outside of a compiled model.
    """
    if torch.compiler.is_compiling():
        marked: Tensor = MARK(x)
        return marked
    return x
