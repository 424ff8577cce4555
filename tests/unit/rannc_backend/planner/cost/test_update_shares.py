"""Shares of updates for all intervals at once: what the bound of each says, and never less than the division."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.planner.cost.update_shares import update_shares
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
