"""The private torch functions that the runtime needs, one Python function each.

In: tensors, or nothing. Out: facts that torch has no public name for. Seen on torch 2.13.0; the test beside says so.
"""

from __future__ import annotations

import torch


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors, ``tensor`` included, share its storage."""
    # The storage object that is made for asking counts once itself.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def backward_keeps_graph() -> bool:
    """True inside a backward that was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
