"""Seconds of operators on a device.

In: `OperatorCost`s, a `Device`, numbers of rows. Out: arrays of seconds. Terms: an operator's seconds are a
*roofline*: the longer of computing and moving, plus its launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import OperatorCost
from rannc_backend.planner.cluster.cluster import Device
from rannc_backend.planner.cost.expressions import evaluate


def operator_seconds(
    operators: Sequence[OperatorCost], device: Device, rows: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward and backward seconds of each operator for each number of rows: two arrays [operators, rows]."""
    kinds = [(operator.dtype, operator.operator_class) for operator in operators]
    rate_of = {kind: device.rate(*kind) for kind in set(kinds)}
    moving_rate_of = {kind: device.memory_rate(kind[1]) for kind in set(kinds)}
    rates = np.array([rate_of[kind] for kind in kinds]).reshape(-1, 1)
    moving_rates = np.array([moving_rate_of[kind] for kind in kinds]).reshape(-1, 1)
    results = []
    for flops, moved, launches in (
        ("forward_flops", "forward_bytes", "num_forward_launches"),
        ("backward_flops", "backward_bytes", "num_backward_launches"),
    ):
        compute = evaluate([getattr(operator, flops) for operator in operators], rows) / rates
        memory = evaluate([getattr(operator, moved) for operator in operators], rows) / moving_rates
        counts = np.array(
            [[getattr(operator, launches)] for operator in operators], dtype=np.float64
        ).reshape(-1, 1)
        results.append(np.maximum(compute, memory) + counts * device.launch_seconds)
    return results[0], results[1]
