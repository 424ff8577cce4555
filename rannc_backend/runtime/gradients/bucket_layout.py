"""Which gradients lie in which bucket, in which order.

In: the parameters of a rank's stage in the order in which backward finishes them, with the ranks that own and those
that update each. Out: `BucketLayout`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rannc_backend.ir.updates import Update
from rannc_backend.kernels.gradient_writes import sum_dtype
from rannc_backend.kernels.message_layout import slot_elements
from rannc_backend.runtime.world import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter's gradient lies: elements [offset, offset + numel) of bucket ``bucket``, at a
    multiple of 128 bytes.
    """

    name: str
    bucket: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    place: tuple[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """What a view of the bucket is found by: offset and shape."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", (self.offset, self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One flat buffer: its owner group, dtype, number of elements and parameter names in order.

    ``rounded_to``: the dtype of its parameters, where their gradients are summed in a wider one; else None.
    ``is_shared``: its ranks are those of several stages. ``updaters``: those that need the sums, where not all do;
    ``is_updated_here``: this rank does. ``is_kept``: its memory stays when it is reduced.
    """

    ranks: Ranks
    dtype: torch.dtype
    device: torch.device
    numel: int
    names: tuple[str, ...]
    is_shared: bool = False
    updaters: Ranks = ()
    is_updated_here: bool = True
    is_kept: bool = True
    rounded_to: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """All buckets of one rank. The same order of buckets per owner group on each of the group's ranks."""

    buckets: tuple[BucketSpec, ...]
    slots: Mapping[str, Slot]
    slots_of: tuple[tuple[Slot, ...], ...] = field(init=False, repr=False, compare=False)  # of each bucket
    left_to_others: frozenset[str] = field(init=False, repr=False, compare=False)  # names that they update

    def __post_init__(self) -> None:
        others = (bucket.names for bucket in self.buckets if not bucket.is_updated_here)
        object.__setattr__(self, "left_to_others", frozenset().union(*others))
        object.__setattr__(
            self,
            "slots_of",
            tuple(tuple([self.slots[name] for name in bucket.names]) for bucket in self.buckets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who updates which parameter, as rank ``rank`` sees it; ``keeps_all``: it keeps what others update, too."""

    updates: Mapping[str, Update] = field(default_factory=dict)
    rank: int = 0
    keeps_all: bool = True

    def updaters(self, name: str) -> Ranks:
        """Those of a parameter, () where all owners update it."""
        update = self.updates.get(name)
        return () if update is None else update.updaters


UNDIVIDED = Division()
_Key = tuple[Ranks, torch.dtype, torch.device, Ranks]


def plan_buckets(
    parameters: Sequence[tuple[str, torch.Tensor]],
    owners: Mapping[str, Ranks],
    stage_ranks: Ranks,
    capacity_bytes: float,
    division: Division = UNDIVIDED,
    *,
    max_buckets: int = 0,
    wide_sums: bool = False,
    device: torch.device | None = None,
) -> BucketLayout:
    """Buckets for ``parameters``, given in the order in which this rank's stage (ranks ``stage_ranks``)
    finishes them. A bucket has the parameters of one updater, and comes where the last of them is finished.
    ``max_buckets``: in place of ``capacity_bytes``, of the parameters that have the same owners, dtype and updater; 0:
    any number. ``wide_sums``: gradients of 16 bits are summed in float32. ``device``: of the buckets, where it is not that of the
    parameters.

    Parameters shared by several stages are sorted by name: the stages may finish them in different orders. So
    are their buckets, and they come last: then every rank waits for sums in an order that fits those of the
    others, and no ranks wait for each other in a ring.
    """
    groups: dict[_Key, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in parameters:
        updaters = division.updaters(name)
        key = (owners[name], tensor.dtype, device or tensor.device, updaters)
        groups.setdefault(key, []).append((name, tensor))
    own = {key: members for key, members in groups.items() if key[0] == stage_ranks}
    shared = {
        key: sorted(groups[key], key=lambda member: member[0])
        for key in sorted(groups.keys() - own.keys(), key=lambda key: (key[0], str(key[1]), key[3]))
    }
    place = {name: number for number, (name, _) in enumerate(parameters)}

    def filled(of: Mapping[_Key, list[tuple[str, torch.Tensor]]]) -> list[tuple[_Key, list[Any]]]:
        return [
            (key, names)
            for key, members in of.items()
            for names in _filled(members, capacity_bytes, sum_dtype(key[1], wide=wide_sums), max_buckets)
        ]

    found = filled(own)
    found.sort(key=lambda item: place[item[1][-1][0]])
    found += filled(shared)
    buckets: list[BucketSpec] = []
    slots: dict[str, Slot] = {}
    for (ranks, parameter_dtype, device, updaters), members in found:
        numel, dtype = 0, sum_dtype(parameter_dtype, wide=wide_sums)
        for name, tensor in members:
            slots[name] = Slot(
                name=name,
                bucket=len(buckets),
                offset=numel,
                shape=tuple(tensor.shape),
                stride=tuple(torch.empty(tensor.shape, device="meta").stride()),
                numel=tensor.numel(),
            )
            # Kernels that read and write 16 bytes at a time would have to copy what begins elsewhere.
            numel += slot_elements(tensor.numel(), dtype)
        is_updated_here = not updaters or division.rank in updaters
        buckets.append(
            BucketSpec(
                ranks=ranks,
                dtype=dtype,
                device=device,
                numel=numel,
                names=tuple(name for name, _ in members),
                is_shared=ranks != stage_ranks,
                updaters=updaters,
                is_updated_here=is_updated_here,
                is_kept=is_updated_here or division.keeps_all,
                rounded_to=None if dtype == parameter_dtype else parameter_dtype,
            )
        )
    return BucketLayout(buckets=tuple(buckets), slots=slots)


def _filled(
    members: Sequence[tuple[str, torch.Tensor]], capacity_bytes: float, dtype: torch.dtype, max_buckets: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Members in order, as many at a time as go into a bucket, one at least. With ``max_buckets`` all
    elements are divided into so many equal parts, and a bucket has the members that end in the same one.
    """
    if max_buckets:
        yield from _in_parts(members, max_buckets)
        return
    found: list[tuple[str, torch.Tensor]] = []
    numel = 0
    for name, tensor in members:
        if found and (numel + tensor.numel()) * dtype.itemsize > capacity_bytes:
            yield found
            found, numel = [], 0
        found.append((name, tensor))
        numel += slot_elements(tensor.numel(), dtype)
    if found:
        yield found


def _in_parts(
    members: Sequence[tuple[str, torch.Tensor]], number: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    ends = list(itertools.accumulate(tensor.numel() for _, tensor in members))
    total = max(ends[-1], 1)
    # Of each member the part of all elements in which it ends.
    places = [max(0, -(-end * number // total) - 1) for end in ends]
    for _, part in itertools.groupby(zip(places, members, strict=True), key=lambda item: item[0]):
        yield [member for _, member in part]
