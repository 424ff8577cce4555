"""Who updates which parameter: one owner of each group, in even shares, the same on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.updates import Update, divide, groups_of, ranks_of_updates

SIZES = st.lists(st.integers(0, 1000), max_size=30)


def largest_share(num_bytes: Sequence[int], num_ranks: int) -> int:
    """Bytes of the rank that updates most, where parameters of these sizes are divided over so many ranks."""
    if num_ranks <= 1:
        return sum(num_bytes)
    loads = [0] * num_ranks
    for size in sorted(num_bytes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def share_bound(descending: Sequence[int], total: int, num_ranks: int) -> float:
    """As `planner.cost.update_shares` has it, of one number of ranks."""
    if num_ranks <= 1 or not descending:
        return float(total)
    later = descending[num_ranks] if len(descending) > num_ranks else 0
    return max(float(descending[0]), total / num_ranks + later * (1 - 1 / num_ranks))


@given(ranks=st.sets(st.integers(0, 20), min_size=1), num_groups=st.integers(1, 25))
def test_groups_are_neighbours_of_like_number(ranks: set[int], num_groups: int) -> None:
    ordered = tuple(sorted(ranks))
    groups = groups_of(ordered, num_groups)
    assert sum(groups, ()) == ordered
    sizes = {len(group) for group in groups}
    assert len(groups) == min(num_groups, len(ranks)) and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


@given(sizes=SIZES, num_ranks=st.integers(1, 9))
def test_shares_are_even_to_a_parameter(sizes: list[int], num_ranks: int) -> None:
    """What is divided is what the account of memory counts, and no more than its bound."""
    names = {f"p{index}": size for index, size in enumerate(sizes)}
    ranks = tuple(range(num_ranks))
    updates = divide(names, dict.fromkeys(names, ranks))
    loads = [sum(names[n] for n, each in updates.items() if each.updaters == (rank,)) for rank in ranks]
    if num_ranks > 1:
        assert updates.keys() == names.keys() and max(loads) == largest_share(sizes, num_ranks)
        assert max(loads) - min(loads) <= max(sizes, default=0)
    else:
        assert not updates
    assert (
        largest_share(sizes, num_ranks)
        <= share_bound(sorted(sizes, reverse=True), sum(sizes), num_ranks) + 1e-9
    )


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 50), min_size=1),
    num_groups=st.integers(1, 5),
    data=st.data(),
)
def test_every_group_has_one_updater(sizes: dict[str, int], num_groups: int, data: st.DataObject) -> None:
    """Whatever owners parameters have: those of a stage, or of several."""
    choices = st.sampled_from([(0,), (0, 1), (2, 3, 4, 5), (0, 1, 2, 3, 4, 5)])
    owners = {name: data.draw(choices) for name in sizes}
    updates = divide(sizes, owners, num_groups)
    for name, ranks in owners.items():
        update = updates.get(name)
        if update is None:  # every owner is a group of its own
            assert len(ranks) <= num_groups or len(ranks) == 1
            continue
        assert sum(update.groups, ()) == ranks and list(update.updaters) == sorted(update.updaters)
        for group, updater in zip(update.groups, update.updaters, strict=True):
            assert updater in group
            assert all(update.of(rank) == (updater, group) for rank in group)
    assert ranks_of_updates(updates.values()) == {
        group for each in updates.values() for group in each.groups if len(group) > 1
    }
    assert updates == divide(dict(reversed(sizes.items())), owners, num_groups)


def test_of_a_small_model() -> None:
    small = divide({"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1)})
    assert [each.updaters for each in small.values()] == [(0,), (1,)]
    sizes = {"a": 4, "b": 3, "c": 3, "d": 1}
    updates = divide(sizes, dict.fromkeys(sizes, (2, 3)))
    whole = ((2, 3),)
    assert updates == {
        "a": Update(groups=whole, updaters=(2,)),
        "b": Update(groups=whole, updaters=(3,)),
        "c": Update(groups=whole, updaters=(3,)),
        "d": Update(groups=whole, updaters=(2,)),
    }
