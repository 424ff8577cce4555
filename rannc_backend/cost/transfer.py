"""Seconds that communication takes on a link: one message, and a ring all-reduce.

In: a `Link`, bytes, numbers of ranks (numbers or numpy arrays). Out: seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rannc_backend.cost.cluster import Link

Numbers = float | NDArray[np.float64]


def message_seconds(link: Link, num_bytes: Numbers) -> Numbers:
    """One message; no bytes, no message."""
    return np.where(np.asarray(num_bytes) > 0, link.latency_seconds + np.asarray(num_bytes) / link.bytes_per_second, 0.0)


def allreduce_seconds(link: Link, num_bytes: Numbers, num_ranks: int) -> Numbers:
    """Ring all-reduce of `num_bytes` over `num_ranks`: 2 (n - 1) steps, each with 1 / n of the bytes."""
    assert num_ranks >= 1, f"an all-reduce over {num_ranks} ranks"
    num_steps = 2 * (num_ranks - 1)
    step_seconds = link.latency_seconds + np.asarray(num_bytes) / num_ranks / (link.bytes_per_second * link.allreduce_share)
    return np.where(np.asarray(num_bytes) > 0, num_steps * step_seconds, 0.0)
