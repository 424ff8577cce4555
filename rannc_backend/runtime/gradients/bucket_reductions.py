"""How the buckets of this rank are summed: in shared memory where the ranks of a group have some, else over
the transport; in their own dtype, or in a narrower one.

In: the transport, the groups that sum, the format in which they do, the limit of a wait. Out: what `GradientBuckets`
needs to make buffers and to start sums. Terms. The *format* of a sum is the dtype in which buckets travel and are added
up, and the scale that they are multiplied by before they are rounded to it and divided by after the sum. Buckets that
are not wider travel as they are, without the scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rannc_backend.kernels.bucket_wires import GRADIENT_DTYPES, dtype_on_wire, from_wire, to_wire
from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.buckets import BufferPool, StartReduce, Waitable, zeros_for
from rannc_backend.runtime.world import BucketSums, Ranks, Transport, Work
from rannc_backend.settings.options import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SumFormat:
    """See the module docstring; ``dtype`` None: every bucket in its own."""

    dtype: torch.dtype | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, config: Config) -> SumFormat:
        """What the options gradient_dtype and gradient_scale say."""
        return cls(dtype=GRADIENT_DTYPES.get(config.gradient_dtype), scale=config.gradient_scale)

    def of_bucket(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which buckets of ``dtype`` are summed."""
        return dtype_on_wire(dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class LimitedWork:
    """A started reduction with the limit for waiting on it."""

    work: Work
    limit_seconds: float | None

    def wait(self) -> None:
        """Block until the sum is there."""
        self.work.wait(self.limit_seconds)


@dataclass(slots=True, kw_only=True)
class _NarrowWork:
    """A started reduction of what a bucket was rounded to."""

    work: LimitedWork
    bucket: torch.Tensor
    narrow: torch.Tensor | None
    scale: float
    is_taken: bool

    def wait(self) -> None:
        """Block until the sum is there, and in the bucket."""
        if self.narrow is None:
            return
        self.work.wait()
        if self.is_taken:
            from_wire(self.narrow, self.bucket, self.scale)
        self.narrow = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReductions:
    """See the module docstring. ``sums``: None where no ranks share memory. ``num_communicators``: of each group;
    buckets go round robin over them.
    """

    transport: Transport
    sums: BucketSums | None
    rank: int = 0
    limit_seconds: float | None = None
    sum_format: SumFormat = SumFormat()
    num_communicators: int = 1
    pool: BufferPool = field(default_factory=BufferPool)
    _num_started: Counter[Ranks] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        transport: Transport,
        groups: Sequence[Ranks],
        *,
        shared_memory: bool,
        rank: int = 0,
        limit_seconds: float | None = None,
        sum_format: SumFormat | None = None,
        num_communicators: int = 1,
        pool: BufferPool | None = None,
    ) -> BucketReductions:
        """Prepare the groups. Collective. ``pool``: of what buckets are rounded to, in shared memory."""
        transport.prepare(groups=groups, num_communicators=num_communicators)
        return cls(
            transport=transport,
            sums=transport.share(groups) if shared_memory else None,
            rank=rank,
            limit_seconds=limit_seconds,
            sum_format=sum_format or SumFormat(),
            num_communicators=num_communicators,
            pool=BufferPool() if pool is None else pool,
        )

    def new_buffer(self, spec: BucketSpec) -> torch.Tensor:
        """Zeros for a bucket."""
        if self.sums is None or self.sum_format.of_bucket(spec.dtype) != spec.dtype:
            return zeros_for(spec)
        return self.sums.new_bucket(spec.numel, spec.dtype, spec.ranks)

    def start(self, buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> Waitable:
        """Start the all-reduce of a bucket, or of rows, which are of another number in each step; see `StartReduce`."""
        dtype = self.sum_format.of_bucket(buffer.dtype)
        if dtype == buffer.dtype or len(ranks) == 1:
            return self._sum(buffer, ranks, takers)
        narrow = self._memory(buffer, dtype, ranks)
        buffer = buffer.view(-1)
        to_wire(buffer, narrow, self.sum_format.scale)
        return _NarrowWork(
            work=self._sum(narrow, ranks, takers),
            bucket=buffer,
            narrow=narrow,
            scale=self.sum_format.scale,
            is_taken=not takers or self.rank in takers,
        )

    def _memory(self, like: torch.Tensor, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
        if self.sums is None or like.dim() > 1:
            return torch.empty(like.numel(), dtype=dtype, device=like.device)
        # What is shared stays so from step to step.
        spec = BucketSpec(ranks=ranks, dtype=dtype, device=like.device, numel=like.numel(), names=())
        return self.pool.take(spec, self.new_buffer).flat

    def _sum(self, buffer: torch.Tensor, ranks: Ranks, takers: Ranks) -> LimitedWork:
        # All ranks of a group start the same buckets in the same order, so they count alike.
        communicator = self._num_started[ranks] % self.num_communicators
        self._num_started[ranks] += 1
        reduce = self.transport.allreduce if self.sums is None else self.sums.reduce
        return LimitedWork(reduce(buffer, ranks, takers, communicator), self.limit_seconds)


@dataclass(slots=True)
class DeferredReductions:
    """The option sync_allreduce: no all-reduce runs beside a backward. Called as what it puts off: what is asked for
    while backward runs starts at the first wait, which comes after the rank's last backward, in the order in which it
    was asked for.
    """

    start: StartReduce
    _asked: list[_LateWork] = field(default_factory=list)

    def __call__(
        self, buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()
    ) -> _LateWork:
        """Note an all-reduce."""
        work = _LateWork(owner=self, buffer=buffer, ranks=ranks, takers=takers)
        self._asked.append(work)
        return work

    def start_all(self) -> None:
        """Start all that are asked for. None is waited for before all have started: ranks may have them in
        different orders.
        """
        asked, self._asked = self._asked, []
        for work in asked:
            work.started = self.start(work.buffer, work.ranks, work.takers)


@dataclass(slots=True, kw_only=True)
class _LateWork:
    owner: DeferredReductions
    buffer: torch.Tensor
    ranks: tuple[int, ...]
    takers: tuple[int, ...]
    started: Waitable | None = None

    def wait(self) -> None:
        """Block until the sum is there."""
        self.owner.start_all()
        assert self.started is not None, "an all-reduce that was not asked for"
        self.started.wait()
