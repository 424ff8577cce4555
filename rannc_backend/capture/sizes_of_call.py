"""What the values of one call say about a captured graph: its sizes, and inputs that may have been taken for constants.

In: a captured graph and the values of its inputs, by position. Out: rows and lengths; the graph with `fixed_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rannc_backend.capture.graph import CapturedGraph
from rannc_backend.ir.graph_input import BatchInput, ReplicatedInput


def sizes_of_call(captured: CapturedGraph, values: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """Rows and lengths of a call with these values."""
    batch = next(spec.position for spec in captured.inputs if isinstance(spec, BatchInput))
    position_of = {spec.name: spec.position for spec in captured.inputs}
    lengths = (values[position_of[length.carrier]].shape[length.dim] for length in captured.lengths)
    return int(values[batch].shape[0]), tuple(map(int, lengths))


def with_fixed_inputs(
    captured: CapturedGraph, values: Sequence[Any], digest: Callable[[Any], list[float]]
) -> CapturedGraph:
    """With those inputs of which it is not known whether they have rows: dimension 0 is as long as the batch of this
    call, and the model's code has made a number of it. ``digest``: numbers that differ where values do.
    """
    rows, _ = sizes_of_call(captured, values)
    found = {
        spec.name: digest(values[spec.position])
        for spec in captured.inputs
        if isinstance(spec, ReplicatedInput) and tuple(values[spec.position].shape[:1]) == (rows,)
    }
    return replace(captured, fixed_inputs=found)
