"""Which replicas update a parameter, where not all of its owners do (ZeRO, Rajbhandari et al. 2020, by whole
parameters).

In: parameters with their bytes and owners, and the number of groups. Out: for each parameter the groups of its
owners, and the rank that updates it in each. Terms: the *updater* of a parameter is the one rank of a group that has
its gradient and its optimizer state, and sends its new value to the others.

Method: longest processing time first (Graham 1969): the largest parameter goes to the rank with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The owners of one parameter, in groups, and the updater of each group; both ascending."""

    groups: tuple[Ranks, ...]
    updaters: Ranks

    def of(self, rank: int) -> tuple[int, Ranks]:
        """The updater of the group of an owner, and that group."""
        place = next(place for place, group in enumerate(self.groups) if rank in group)
        return self.updaters[place], self.groups[place]


def groups_of(ranks: Ranks, num_groups: int) -> tuple[Ranks, ...]:
    """Neighbours, in groups whose sizes differ by one at most; no group is empty."""
    number = min(num_groups, len(ranks))
    bounds = [place * len(ranks) // number for place in range(number + 1)]
    return tuple(ranks[begin:end] for begin, end in zip(bounds, bounds[1:]))


def divide(
    num_bytes: Mapping[str, int], owners: Mapping[str, Ranks], num_groups: int = 1
) -> dict[str, Update]:
    """Of the parameters with sizes ``num_bytes`` those that not all of their owners update, the same on every rank."""
    loads: dict[int, int] = {}
    found = {}
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        groups = groups_of(owners[name], num_groups)
        if max(map(len, groups)) < 2:
            continue
        updaters = [min(group, key=lambda rank: (loads.get(rank, 0), rank)) for group in groups]
        for rank in updaters:
            loads[rank] = loads.get(rank, 0) + num_bytes[name]
        found[name] = Update(groups=groups, updaters=tuple(updaters))
    return found


def ranks_of_updates(updates: Iterable[Update]) -> set[Ranks]:
    """The groups in which new values are sent."""
    return {group for update in updates for group in update.groups if len(group) > 1}
