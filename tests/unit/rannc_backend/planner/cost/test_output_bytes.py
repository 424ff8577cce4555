"""Outputs beside a loss: delivered where there is room, on made-up graphs whose bytes are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph, Output
from rannc_backend.ir.plan import Plan, lane_bytes
from rannc_backend.planner.cost.output_bytes import OUTPUT_SHARE, OutputBytes, why_left_out
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.ir.sample_plans import sample_plan
from tests.unit.rannc_backend.planner.blocks.block_lines import ROWS, random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

NUM_BLOCKS = 6
ROWS_OF_BATCH = 24


def with_outputs(megabytes: dict[int, int], *, has_loss: bool = True, seed: int = 0) -> BlockGraph:
    """Blocks, some of which make an output of so many megabytes per row."""
    outputs = tuple(
        Output(name=f"out{block}", module=f"head.{block}", block=block, num_bytes=size * 2**20 * ROWS)
        for block, size in megabytes.items()
    )
    return replace(random_line(seed, NUM_BLOCKS), outputs=outputs, has_loss=has_loss)


def plan_of(graph: BlockGraph, num_devices: int, **options: Any) -> Plan:
    cluster = local_cpu(num_devices, memory_bytes=64 * BYTES_PER_GB)
    return plan_blocks(
        graph,
        Config(mem_margin=0.0, **options),
        cluster=cluster,
        batch_rows=ROWS_OF_BATCH,
        schedules=("1f1b", "fill_drain"),
        fingerprint="f" * 64,
    )


def made_bytes(plan: Plan, megabytes: dict[int, int], stage: int) -> int:
    """What each rank of a stage needs for the outputs: what it makes, and its own rows of all."""
    number, replicas = plan.num_micro_batches, plan.stages[stage].num_replicas
    rows = math.ceil(math.ceil(ROWS_OF_BATCH / number) / replicas)
    made = sum(size for block, size in megabytes.items() if block in plan.stages[stage].blocks)
    own = math.ceil(ROWS_OF_BATCH / plan.world_size) if plan.world_size > 1 or number > 1 else 0
    return 2**20 * (number * rows * made + own * sum(megabytes.values()))


def test_what_fits_exactly_is_delivered() -> None:
    stage = sample_plan().stages[0]
    limit = stage.predicted.peak_bytes + 1000
    assert why_left_out([stage], [1000 * OUTPUT_SHARE], limit) == ""
    assert "stage 0" in why_left_out([stage], [1000 * OUTPUT_SHARE + 1], limit)


def test_why_outputs_are_left_out_names_the_stage_and_both_sizes() -> None:
    megabytes = {NUM_BLOCKS - 1: 500}
    graph = with_outputs(megabytes)
    bare = plan_of(graph, 2, outputs="loss", partition_num=2)
    limit = bare.stages[1].predicted.peak_bytes / BYTES_PER_GB + 1
    plan = plan_of(graph, 2, partition_num=2, mem_limit_gb=limit)
    assert "stage 1" in plan.outputs_left_out and "50 %" in plan.outputs_left_out
    assert bare.outputs_left_out == "option outputs is 'loss'"
    assert not plan_of(graph, 2, partition_num=2).outputs_left_out


@pytest.mark.parametrize("options", [{"outputs": "all"}, {}])
def test_outputs_that_always_come_have_their_place_in_the_search(options: dict[str, str]) -> None:
    graph = with_outputs({0: 400}, has_loss=bool(options))
    plan = plan_of(graph, 2, **options)
    bare = plan_of(graph.without_outputs(), 2, stage_replicas=",".join(map(str, plan.stage_replicas)))
    assert not plan.outputs_left_out
    assert all(stage.predicted.peak_bytes >= made_bytes(plan, {0: 400}, stage.index) for stage in plan.stages)
    limit = bare.stages[0].predicted.peak_bytes / BYTES_PER_GB
    with pytest.raises(InfeasiblePlanError, match=r"stage 0 of \d \(layers.0.*outputs") as caught:
        plan_of(graph, 2, mem_limit_gb=min(limit, 4.0), **options)
    assert ("outputs=auto" in caught.value.options_that_would_do) == bool(options)


def test_options_that_would_do_together_are_named_together() -> None:
    graph = with_outputs({0: 400})
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(graph, 2, outputs="loss", mem_limit_gb=0.001)
    assert caught.value.smallest_bytes is not None
    limit = 1.02 * caught.value.smallest_bytes / BYTES_PER_GB
    asked = {"partition_num": 1, "replica_num": 2, "pipeline_num": 1, "recompute": 1.0, "outputs": "all"}
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(graph, 2, mem_limit_gb=limit, **asked)
    (together,) = caught.value.options_that_would_do
    assert "pipeline_num=1" in together and "outputs=auto" in together


@pytest.mark.parametrize("place", [(0, 3, 2, 4), (2, NUM_BLOCKS, 1, 3), (0, NUM_BLOCKS, 4, 1)])
def test_the_tables_of_the_search_have_what_a_stage_is_said_to_need(place: tuple[int, ...]) -> None:
    begin, end, replicas, number = place
    megabytes = {1: 30, 5: 70}
    found = []
    for graph in (with_outputs(megabytes), with_outputs(megabytes).without_outputs()):
        cluster = local_cpu(4, memory_bytes=64 * BYTES_PER_GB)
        costs = IntervalCosts(
            graph=graph,
            cluster=cluster,
            batch_rows=ROWS_OF_BATCH,
            micro_batches=(1, 3, 4),
            pricer=AnalyticPricer(device=cluster.device),
            optimizer_factor=2.0,
        )
        tables = costs.tables(number)
        option = tables.replicas.tolist().index(replicas)
        fixed = tables.fixed_bytes[0][begin, end - begin - 1, option]
        found.append((fixed, costs.memory(begin, end, costs.budgets[0], number, replicas).buffers))
    rows = math.ceil(math.ceil(ROWS_OF_BATCH / number) / replicas)
    made = sum(size for block, size in megabytes.items() if begin <= block < end)
    wanted = 2**20 * (number * rows * made + 6 * sum(megabytes.values()))
    assert [a - b for a, b in zip(*found, strict=True)] == [pytest.approx(wanted)] * 2


def test_one_device_that_makes_all_in_one_piece_gives_back_what_it_made() -> None:
    alone = OutputBytes(graph=with_outputs({0: 3, 2: 5}), batch_rows=8, num_devices=1)
    blocks = range(NUM_BLOCKS)
    assert alone.of_any(1) == 0 and alone.of_stage(blocks, 1, 1) == alone.of_any(2) == 64 * 2**20
    assert alone.of_stage(blocks, 2, 1) == 2 * 64 * 2**20
    assert alone.whole() == (24 * 2**20, 40 * 2**20)


# Plans take long to make: the smallest example is not looked for.
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    seed=st.integers(0, 50),
    megabytes=st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.integers(1, 600), min_size=1, max_size=3),
    num_devices=st.integers(1, 3),
    room=st.floats(0.2, 4.0),
)
def test_outputs_are_delivered_where_all_of_them_fit_in_their_share(
    seed: int, megabytes: dict[int, int], num_devices: int, room: float
) -> None:
    graph = with_outputs(megabytes, seed=seed)
    bare = plan_of(graph, num_devices, outputs="loss")
    peaks = [stage.predicted.peak_bytes for stage in bare.stages]
    needed = [made_bytes(bare, megabytes, index) for index in range(bare.num_stages)]
    limit = max(peak + room * size for peak, size in zip(peaks, needed, strict=True)) / BYTES_PER_GB
    # With less memory another plan may be the best: it has to keep its own promise.
    kept = plan_of(graph, num_devices, outputs="loss", mem_limit_gb=limit)
    plan = plan_of(graph, num_devices, mem_limit_gb=limit)
    assert [stage.blocks for stage in plan.stages] == [stage.blocks for stage in kept.stages]
    needed = [made_bytes(plan, megabytes, index) for index in range(plan.num_stages)]
    left = [plan.memory_limit_bytes - stage.predicted.peak_bytes for stage in kept.stages]
    is_delivered = all(size <= OUTPUT_SHARE * free for size, free in zip(needed, left, strict=True))
    assert is_delivered == (not plan.outputs_left_out)
    for stage, without, size in zip(plan.stages, kept.stages, needed, strict=True):
        added = size if is_delivered else 0
        assert stage.predicted.peak_bytes == without.predicted.peak_bytes + added
        assert stage.predicted.buffer_bytes == without.predicted.buffer_bytes + added
    assert {output.name: output.num_bytes for output in plan.outputs} == {
        f"out{block}": size * ROWS_OF_BATCH * 2**20 for block, size in megabytes.items()
    }
    assert all(
        int(output.name.removeprefix("out")) in plan.stages[output.stage].blocks for output in plan.outputs
    )


def test_stages_of_the_same_ranks_share_what_is_left() -> None:
    plan = sample_plan(replicas=(1, 1))
    stages = [stage.model_copy(update={"ranks": (0,)}) for stage in plan.stages]
    used = lane_bytes((each.predicted.peak_bytes, each.predicted.workspace_bytes) for each in stages)
    needed = (100.0, 100.0)
    assert why_left_out(stages, needed, used + 400) == ""
    assert "stages 0 and 1" in why_left_out(stages, needed, used + 399)
    assert why_left_out(plan.stages, needed, used + 399) == ""
