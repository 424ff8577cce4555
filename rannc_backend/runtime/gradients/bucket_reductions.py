"""How the buckets of this rank are summed: in shared memory where the ranks of a group have some, else over
the transport.

In: the transport, the groups that sum, the limit of a wait. Out: what `GradientBuckets` needs to make buffers
and to start sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.buckets import zeros_for
from rannc_backend.runtime.world import BucketSums, Ranks, Transport, Work


@dataclass(frozen=True, slots=True)
class LimitedWork:
    """A started reduction with the limit for waiting on it."""

    work: Work
    limit_seconds: float | None

    def wait(self) -> None:
        """Block until the sum is there."""
        self.work.wait(self.limit_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReductions:
    """See the module docstring. ``sums``: None where no ranks share memory."""

    transport: Transport
    sums: BucketSums | None
    limit_seconds: float | None = None

    @classmethod
    def of(
        cls,
        transport: Transport,
        groups: Sequence[Ranks],
        *,
        shared_memory: bool,
        limit_seconds: float | None = None,
    ) -> BucketReductions:
        """Prepare the groups. Collective."""
        if shared_memory:
            sums = transport.share(groups)
        else:
            transport.prepare(groups=groups)
            sums = None
        return cls(transport=transport, sums=sums, limit_seconds=limit_seconds)

    def new_buffer(self, spec: BucketSpec) -> torch.Tensor:
        """Zeros for a bucket."""
        if self.sums is None:
            return zeros_for(spec)
        return self.sums.new_bucket(spec.numel, spec.dtype, spec.ranks)

    def start(self, buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> LimitedWork:
        """Start the all-reduce of a bucket; see `StartReduce`."""
        reduce = self.transport.allreduce if self.sums is None else self.sums.reduce
        return LimitedWork(reduce(buffer, ranks, takers), self.limit_seconds)
