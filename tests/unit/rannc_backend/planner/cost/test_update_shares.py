"""Shares of updates for all intervals at once: what the bound of each says, and never less than the division."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.cost.update_shares import SharedInLane, update_shares
from tests.unit.rannc_backend.ir.test_updates import largest_share, share_bound

BLOCKS = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), max_size=4), min_size=1, max_size=6
)


@given(blocks=BLOCKS, divisors=st.sets(st.integers(1, 9), min_size=1))
def test_every_interval_is_bounded(blocks: list[dict[str, int]], divisors: set[int]) -> None:
    sizes = {name: size for block in blocks for name, size in block.items()}
    blocks = [{name: sizes[name] for name in block} for block in blocks]  # a parameter has one size
    ordered = np.array(sorted(divisors))
    found = update_shares(blocks, len(blocks), ordered)
    for begin in range(len(blocks)):
        for length in range(len(blocks)):
            names = set().union(*blocks[begin : begin + length + 1])
            descending = sorted((sizes[name] for name in names), reverse=True)
            for place, divisor in enumerate(ordered.tolist()):
                bound = share_bound(descending, sum(descending), divisor)
                assert found[begin, length, place] == pytest.approx(bound)
                assert largest_share(descending, divisor) <= found[begin, length, place] + 1e-9


def shared(blocks: list[dict[str, int]], num_groups: int | None = 1) -> SharedInLane:
    return SharedInLane(
        blocks=blocks,
        cluster=load_cluster("a100-80gb", 64, 8),
        num_communicators=1,
        state_factor=2.0,
        num_groups=num_groups,
        rounded=np.ceil,
    )


@given(blocks=BLOCKS, replicas=st.integers(2, 9))
def test_updates_of_a_lane_are_divided_once(blocks: list[dict[str, int]], replicas: int) -> None:
    """Never less than the rank with most of them has, and no stage has more than it has alone."""
    sizes = {name: size for block in blocks for name, size in block.items()}
    blocks = [{name: sizes[name] for name in block} for block in blocks]
    stages = [(index, index + 1) for index in range(len(blocks))]
    twice, _ = shared(blocks).counted_twice(stages, replicas, 2)
    alone = [
        np.ceil(2.0 * update_shares([block], 1, np.array([replicas]))[0, 0, 0]) if block else 0.0
        for block in blocks
    ]
    assert (twice >= 0).all() and (twice <= np.array(alone)).all()
    names = set().union(*blocks)
    together = largest_share(sorted((sizes[name] for name in names), reverse=True), replicas)
    assert sum(alone) - twice.sum() >= 2.0 * together - 1e-6


def test_sizes_of_a_lane_that_are_known() -> None:
    """Six stages of a parameter each, on 8 replicas: a replica updates one of them, not six."""
    blocks = [{str(index): 80} for index in range(6)]
    stages = [(index, index + 1) for index in range(6)]
    twice, _ = shared(blocks).counted_twice(stages, 8, 2)
    assert 6 * 160 - twice.sum() == pytest.approx(160, abs=6)
    everything, _ = shared(blocks, num_groups=None).counted_twice(stages, 8, 2)
    assert not everything.any()


@pytest.mark.parametrize("num_neighbours", [0, 1, 2])
def test_ranks_of_a_lane_have_each_communicator_once(num_neighbours: int) -> None:
    lane = shared([{}] * 6)
    stages = [(0, 1), (2, 3), (5, 6)]
    _, twice = lane.counted_twice(stages, 8, num_neighbours)
    own = [lane.communicators(begin, end, 8) for begin, end in stages]
    # Two of all ranks, one of the replicas, and one for each neighbour.
    assert sum(own) - twice.sum() == (3 + num_neighbours) * lane.cluster.device.communicator_bytes
    assert (np.array(own)[1:] == twice[1:]).all()


def test_groups_that_divide_updates_have_a_communicator_each() -> None:
    cost = shared([{}]).cluster.device.communicator_bytes
    whole = shared([{}], num_groups=1).communicators(0, 1, 8)
    assert shared([{}], num_groups=2).communicators(0, 1, 8) == whole + cost
    assert shared([{}], num_groups=8).communicators(0, 1, 8) == whole
