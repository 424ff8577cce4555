"""Triton where it is installed, and what the kernel files need to live without it.

Out: `triton`, `tl` and `jit`, which leaves a function as it is where there is no Triton; nothing can be
launched then and the plain-PyTorch references do the work. `SIMULATED` is true in Triton's interpreter
(TRITON_INTERPRET=1), whose casts round otherwise than a GPU does.

Terms. A *kernel* is a function decorated with `jit`; a *launcher* starts it on tensors of a GPU; a
*reference* does the same with PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform, or a CPU build of torch alone
    triton = None
    tl = None

HAS_TRITON = triton is not None
SIMULATED = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, with its options, where there is Triton."""
    if not HAS_TRITON:
        return function or (lambda function: function)
    return triton.jit(function, **options)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of ``dtype``."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the device of ``tensor`` the current one, where kernels start."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
