"""All-reduces of gradient buckets by ranks of one host, in memory that they share: each rank sums a slice of
everyone's bucket in place.

In: buckets and groups of ranks. Out: `Work` objects, to be waited for. Every bucket is read once and written
once, where a socket costs copies into the system and out of it on both sides.

The ranks of a group first tell each other where their buckets lie (*announcement*: all have come, so all
buckets are complete), then each sums its slice for all, then they tell each other that they have (*answer*:
nobody touches another's bucket any more). What they tell are collectives of a few bytes over gloo, so that a
rank that fails or does not come is noticed as in any other wait. Ranks go on at different times, but start
collectives in the same order: announcements in one process group, by the order in which buckets are given
here; answers in another one, in the same order. Where a rank's bucket cannot be shared, all ranks of the
group learn it from the announcement, or from a question that is asked once for buckets that have not met
before, and that bucket is summed over gloo.

A sum is finished while all its ranks wait for it; nothing goes on in the background. So ranks have to wait
for the sums of different groups in one order (`buckets.plan_buckets`), and after everything else that others
need of them (`schedule/lowering.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rannc_backend.log.logger import say_once
from rannc_backend.runtime.comm.shared_memory import NOT_SHARED, Handle, SharedMemory, add_up
from rannc_backend.runtime.world import Ranks

logger = logging.getLogger(__name__)

# Below it, two collectives of a few bytes take as long as one of all (tests/benchmarks/shared_sums.py).
_FEWEST_BYTES = 2**21


class Collective(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, limit_seconds: float | None = None) -> None:
        """Block until it is over."""
        ...


StartSum = Callable[[torch.Tensor], Collective]
"""Starts summing a tensor over the ranks of a group, in place."""


@dataclass(slots=True, kw_only=True)
class SharedGroup:
    """One group of ranks: its reductions under way, oldest first, and the two process groups in which they
    talk.
    """

    ranks: Ranks
    rank: int
    memory: SharedMemory
    announce: StartSum
    answer: StartSum
    _under_way: deque[SharedReduction] = field(default_factory=deque)

    @property
    def own(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.rank)

    def start(self, bucket: torch.Tensor, takers: Ranks = ()) -> SharedReduction:
        """Begin to sum a bucket, for all or for ``takers`` alone, and go on with earlier ones as far as that needs no
        waiting.
        """
        reduction = SharedReduction(self, bucket, takers)
        self._under_way.append(reduction)
        for earlier in list(self._under_way):
            if not earlier.advance():
                break
        return reduction

    def finish(self, reduction: SharedReduction, limit_seconds: float | None) -> None:
        """Wait until a bucket is summed; those before it are, then, too."""
        while reduction in self._under_way:
            self._under_way[0].complete(limit_seconds)
            self._under_way.popleft()

    def handles_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """A table with this rank's handle in its row, to be summed over the group."""
        table = torch.zeros(len(self.ranks), len(NOT_SHARED), dtype=torch.int64)
        table[self.own] = torch.tensor(self.memory.handle_of(bucket))
        return table

    def others(self, handles: tuple[Handle, ...], bucket: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The other ranks' buckets; None where one cannot be opened."""
        opened = [
            self.memory.open(handle, bucket) for place, handle in enumerate(handles) if place != self.own
        ]
        found = tuple(tensor for tensor in opened if tensor is not None)
        return found if len(found) == len(opened) else None


class SharedReduction:
    """One bucket's way through announcement, sum and answer; a `Work`."""

    def __init__(self, group: SharedGroup, bucket: torch.Tensor, takers: Ranks) -> None:
        self._group = group
        self._steps = self._run(bucket, tuple(group.ranks.index(rank) for rank in takers))
        self._may_pass = False
        self._waits_for: Collective | None = next(self._steps)

    def wait(self, limit_seconds: float | None = None) -> None:
        """Block until the sum is there."""
        self._group.finish(self, limit_seconds)

    def advance(self) -> bool:
        """Go on without waiting. True when the next reduction may: this one's last collective has been
        started.
        """
        while self._waits_for is not None and self._waits_for.is_completed():
            self.complete_one(None)
        return self._may_pass

    def complete(self, limit_seconds: float | None) -> None:
        """Go on to the end."""
        while self._waits_for is not None:
            self.complete_one(limit_seconds)

    def complete_one(self, limit_seconds: float | None) -> None:
        """Wait for the collective under way, and go on to the next."""
        assert self._waits_for is not None, "a reduction that is over"
        self._waits_for.wait(limit_seconds)
        self._waits_for = next(self._steps, None)

    def _run(self, bucket: torch.Tensor, takers: tuple[int, ...]) -> Iterator[Collective]:
        group = self._group
        table = group.handles_of(bucket)
        yield group.announce(table)
        handles = tuple((row[0], row[1], row[2], row[3]) for row in table.tolist())
        others = None
        if NOT_SHARED not in handles:
            chunk = group.memory.chunk_of(bucket)
            assert chunk is not None, "a bucket with a handle and without memory"
            # The same question on all ranks, since all have seen the same handles.
            if handles not in chunk.seen:
                opened = group.others(handles, bucket)
                num_ready = torch.tensor([opened is not None], dtype=torch.int64)
                yield group.answer(num_ready)
                chunk.seen[handles] = opened if num_ready.item() == len(handles) else None
            others = chunk.seen[handles]
        if others is None:
            say_once(
                logger, f"ranks {list(group.ranks)} cannot share memory: their gradients are summed over gloo"
            )
            last = group.answer(bucket)
        else:
            add_up([*others[: group.own], bucket, *others[group.own :]], group.own, takers=takers)
            last = group.answer(torch.zeros(1, dtype=torch.int64))
        self._may_pass = True
        yield last


class SharedSums:
    """The groups of this rank whose ranks all are in one place.

    Args:
        places: of every rank, see `shared_memory.place`.
        plain: starts an all-reduce over gloo, for groups that cannot share: `GroupTransport.allreduce`.
    """

    def __init__(
        self,
        *,
        rank: int,
        places: tuple[str, ...],
        plain: Callable[[torch.Tensor, Ranks, Ranks, int], Collective],
    ) -> None:
        self.rank = rank
        self._places = places
        self._plain = plain
        self._memory = SharedMemory()
        self._groups: dict[Ranks, SharedGroup] = {}

    def possible(self, ranks: Ranks) -> bool:
        """Whether these ranks are in one place; the same answer on every rank."""
        return (
            len(ranks) > 1
            and len({self._places[rank] for rank in ranks}) == 1
            and self._places[ranks[0]] != ""
        )

    def add(self, ranks: Ranks, *, announce: StartSum, answer: StartSum) -> None:
        """A group of which this rank is one, with what starts collectives in its two process groups."""
        self._groups[ranks] = SharedGroup(
            ranks=ranks, rank=self.rank, memory=self._memory, announce=announce, answer=answer
        )

    def clear(self) -> None:
        """Forget all groups: their process groups end. Memory stays with its tensors."""
        self._groups.clear()

    def new_bucket(self, numel: int, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
        """Zeros to be summed over a group, shared where that is possible."""
        if ranks in self._groups and numel * dtype.itemsize >= _FEWEST_BYTES:
            try:
                return self._memory.zeros(numel, dtype)
            except OSError as error:
                say_once(logger, f"no shared memory for gradients: {error}")
        return torch.zeros(numel, dtype=dtype)

    def reduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> Collective | SharedReduction:
        """Start summing a tensor over a group, in place; every rank of it gives one of the same size. ``takers``,
        ``communicator``: as of `BucketSums`.
        """
        if ranks in self._groups and tensor.nbytes >= _FEWEST_BYTES:
            return self._groups[ranks].start(tensor, takers)
        return self._plain(tensor, ranks, takers, communicator)
