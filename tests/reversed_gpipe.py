"""A schedule that only the tests know, added as any other: GPipe with its backwards in reverse order.

Saved values are used last in, first out. A step takes as long as with `fill_drain`, as each stage has as many
micro-batches to wait for; gradients are summed from the last micro-batch to the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from rannc_backend.schedule.fill_drain import FillDrain


@dataclass(frozen=True, slots=True, kw_only=True)
class ReversedGPipe(FillDrain):
    """See the module docstring."""

    def backwards(self, num_micro_batches: int) -> range:
        """See `FillDrain`."""
        return range(num_micro_batches - 1, -1, -1)


SCHEDULE = ReversedGPipe(name="reversed_gpipe", eager_backward=False)
