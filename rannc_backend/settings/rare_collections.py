"""Python looks for cycles of garbage less often while graphs are traced, planned and compiled, which makes
many objects and keeps them.

In: a stretch of work. Out: the same, a sixth quicker (docs/performance.md), and the collector as the user has
set it afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OBJECTS_BETWEEN_COLLECTIONS = 100_000


def begin_rare_collections() -> Callable[[], None]:
    """From now on until what this gives is called. Stretches may lie within each other, and end in any
    order.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS_BETWEEN_COLLECTIONS:  # 0: the user has switched it off
        return lambda: None
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    return lambda: gc.set_threshold(*before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """As `begin_rare_collections`, for a block."""
    end = begin_rare_collections()
    try:
        yield
    finally:
        end()
