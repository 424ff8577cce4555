"""What the C library does with memory that a step on CPUs has freed: it keeps it for the next step.

In: nothing. Out: settings of this process's `malloc`.

A step frees all that its forward has saved, and its gradients lie in buckets that stay. So glibc finds the end of its heap free and gives
it back to the system, which hands it out again in the next step, page by page and filled with zeros: 47 to 71 MB in a step of one second,
2 % of its time (docs/performance.md). What is kept is at most what a step has held at one time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

# mallopt(3): names of parameters, and the largest values that glibc takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT_BYTES = 2**31 - 1
_LARGEST_IN_HEAP_BYTES = 2**25
# Who sets one of these has made up their mind.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on keep freed memory, in blocks of up to 32 MB each; False where the user or the system has another way."""
    library = _library()
    if not hasattr(library, "mallopt") or any(environ.get(name) for name in _VARIABLES):
        return False
    return bool(library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT_BYTES) and library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES))


def give_back_memory() -> None:
    """Give back what is free now, also between what is in use."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _library() -> Any:
    return ctypes.CDLL(None)
