"""How long messages and all-reduces take between the ranks of this job, over the transport that a step uses.

In: a `World`, which ranks are neighbours. Out: `MessageSeconds` and `AllreduceSeconds`, this rank's own.
Collective: every rank calls the same functions in the same order, also one that has no partner. All pairs and
groups measure at the same time, as they share their wires in a step. Numbers of rounds are fixed, so that no
rank stops before its partner does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rannc_backend.runtime.gradients.bucket_layout import BucketSpec
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions
from rannc_backend.runtime.state_hooks import STATE_CHANNEL
from rannc_backend.runtime.world import World

_SMALL_BYTES = 512
_LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_NUM_SMALL, _NUM_LARGE = 15, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSeconds:
    """Seconds of a transfer of next to nothing, and of one of `large_bytes`."""

    small: float
    large: float
    large_bytes: int


def message_seconds(world: World, pairs: Sequence[tuple[int, int]]) -> TransferSeconds | None:
    """One way between the ranks of this rank's pair; None where it is in no pair. A rank is in one pair at
    most.
    """
    world.transport.prepare(channels=[STATE_CHANNEL])
    partners = {**dict(pairs), **{second: first for first, second in pairs}}
    partner = partners.get(world.rank)
    small, large = (
        _tensor(world, num_bytes) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES[world.device.type])
    )

    def there_and_back(tensor: torch.Tensor) -> None:
        if partner is None:
            return
        order = (world.transport.isend, world.transport.irecv)
        for start in order if world.rank < partner else reversed(order):
            start(tensor, partner, STATE_CHANNEL).wait()

    world.control.barrier(what="measuring messages")
    times = TransferSeconds(
        small=_seconds(world, lambda: there_and_back(small), _NUM_SMALL) / 2,
        large=_seconds(world, lambda: there_and_back(large), _NUM_LARGE) / 2,
        large_bytes=large.numel(),
    )
    return None if partner is None else times


def allreduce_seconds(
    world: World, groups: Sequence[tuple[int, ...]], *, shared_memory: bool
) -> TransferSeconds | None:
    """A bucket's all-reduce in this rank's group of `groups`, which have no rank in common; None where it is
    in none.
    """
    reductions = BucketReductions.of(world.transport, groups, shared_memory=shared_memory)
    (group,) = [ranks for ranks in groups if world.rank in ranks] or [()]

    def new_bucket(num_bytes: int) -> torch.Tensor:
        numel = num_bytes // torch.float32.itemsize
        return reductions.new_buffer(
            BucketSpec(ranks=group, dtype=torch.float32, device=world.device, numel=numel, names=())
        )

    small, large = new_bucket(_SMALL_BYTES), new_bucket(_LARGE_BYTES[world.device.type])

    def reduce(tensor: torch.Tensor) -> None:
        if group:
            reductions.start(tensor, group).wait()

    world.control.barrier(what="measuring all-reduces")
    times = TransferSeconds(
        small=_seconds(world, lambda: reduce(small), _NUM_SMALL),
        large=_seconds(world, lambda: reduce(large), _NUM_LARGE),
        large_bytes=large.numel() * large.element_size(),
    )
    return times if len(group) > 1 else None


def _tensor(world: World, num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)


def _seconds(world: World, transfer: Callable[[], None], num_rounds: int) -> float:
    seconds = []
    for _ in range(num_rounds + 1):
        begin = time.perf_counter()
        transfer()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - begin)
    # The first one may open a connection. A quarter of the others is faster than the answer: what makes
    # single ones slow, another program on the core of a rank, is no property of the link.
    return sorted(seconds[1:])[num_rounds // 4]
