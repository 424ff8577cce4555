"""Segments that are computed again one at a time: which ones are chosen, and what they cost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.cost.segments import AGAIN_SHARE, Segments, best_segments
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu


def total(saved: np.ndarray, kept: np.ndarray, segments: tuple[int, ...]) -> float:
    """What is kept between segments, and what the fullest one saves."""
    size = len(saved)
    bounds = [0, *(place for place in range(1, size) if segments[place] != segments[place - 1]), size]
    runs = list(itertools.pairwise(bounds))
    return sum(kept[a, b] for a, b in runs) + max(saved[a:b].sum() for a, b in runs)


@given(
    saved=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    crossing=st.lists(st.integers(1, 20), min_size=8, max_size=8),
)
def test_the_segments_need_least_memory_of_all(saved: list[int], crossing: list[int]) -> None:
    size = len(saved)
    sizes = np.array(saved, dtype=float)
    kept = np.zeros((size + 1, size + 1))
    for end in range(1, size):
        kept[:end, end] = crossing[end]
    found = best_segments(sizes, kept)
    assert list(found) == sorted(found) and found[0] == 0 and set(found) == set(range(found[-1] + 1))
    every = (tuple(np.cumsum([0, *cuts]).tolist()) for cuts in itertools.product((0, 1), repeat=size - 1))
    least = min(total(sizes, kept, each) for each in every)
    # Limits of what a segment may save are tried in steps of some percent.
    assert total(sizes, kept, found) <= 1.1 * least


def test_equal_layers_are_parted_as_by_chen() -> None:
    """n layers that save s each, and keep k each: segments of sqrt(n k / s) layers."""
    size, layer, between = 64, 1.0, 4.0
    kept = np.zeros((size + 1, size + 1))
    kept[:, 1:size] = between
    lengths = np.bincount(best_segments(np.full(size, layer), kept))
    assert 12 <= lengths.max() <= 20, lengths  # sqrt(64 * 4) = 16


def test_prices_keep_what_goes_on_and_need_a_segment_beside_it() -> None:
    graph = random_line(3, 9)
    segments = Segments(graph, fused=False)
    number = segments.of_block
    rows = [2, 5]
    pricer = AnalyticPricer(device=local_cpu(1).device)
    whole = [pricer.prices(block, rows, 1.0) for block in graph.blocks]
    prices = segments.prices(whole, rows)
    for place, (price, full) in enumerate(zip(prices, whole, strict=True)):
        kept = sum(
            (evaluate([flow.num_bytes], rows)[0]
             for flow in graph.flows if flow.producer == place and number[flow.consumers[-1]] > number[place]),
            np.zeros(len(rows)),
        )  # fmt: skip
        again = sum(
            (other.saved_bytes for mark, other in zip(number, whole, strict=True) if mark == number[place]),
            np.zeros(len(rows)),
        )
        np.testing.assert_allclose(price.saved_bytes, kept)
        np.testing.assert_allclose(price.workspace_bytes, full.workspace_bytes + AGAIN_SHARE * again)
        np.testing.assert_allclose(price.backward_seconds, full.backward_seconds + full.forward_seconds)


def test_blocks_that_are_told_again_for_later_ones_are_computed_again_as_a_whole() -> None:
    graph = random_line(3, 9)
    again, *others = graph.flows
    while again.producer < 0:
        again, *others = others
    flows = tuple(replace(flow, is_again=flow is again) for flow in graph.flows)
    rows = [2, 5]
    pricer = AnalyticPricer(device=local_cpu(1).device)
    whole = [pricer.prices(block, rows, 1.0) for block in graph.blocks]
    prices = Segments(replace(graph, flows=flows), fused=False).prices(whole, rows, told=whole)
    for place, (price, full) in enumerate(zip(prices, whole, strict=True)):
        once_more = full.forward_seconds if place == again.producer else np.zeros(len(rows))
        np.testing.assert_allclose(price.backward_seconds, full.backward_seconds + once_more)
        np.testing.assert_allclose(price.forward_seconds, full.forward_seconds)


@pytest.mark.parametrize("seed", (1, 2))
def test_a_plan_says_the_segments_of_its_blocks_and_takes_them_where_memory_asks(seed: int) -> None:
    line = random_line(seed, 9)
    graph = replace(line, blocks=tuple(replace(block, workspace_bytes=()) for block in line.blocks))

    def plan(**options: object) -> Plan:
        return plan_blocks(
            graph, Config(mem_margin=0.0, pipeline_num=6, partition_num=3, **options), cluster=local_cpu(3, memory_bytes=64 * BYTES_PER_GB),
            batch_rows=96, schedules=("1f1b", "fill_drain"), fingerprint="f" * 64,
        )  # fmt: skip

    asked = plan(recompute="segments")
    assert tuple(block.segment for block in asked.blocks) == Segments(graph, fused=False).of_block
    assert {stage.recompute for stage in asked.stages} == {SEGMENTS_BUDGET}
    roomy = plan()
    assert {stage.recompute for stage in roomy.stages} == {1.0}
    fullest = max(stage.predicted.peak_bytes for stage in roomy.stages) / BYTES_PER_GB
    shares: set[float] = set()
    with pytest.raises(InfeasiblePlanError):
        for share in np.linspace(0.9, 0.1, 17):
            shares.update(stage.recompute for stage in plan(mem_limit_gb=share * fullest).stages)
    assert shares >= {1.0, SEGMENTS_BUDGET}, shares
