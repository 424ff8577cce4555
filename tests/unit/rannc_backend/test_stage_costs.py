"""Costs of intervals of blocks: what a cut gives them, and parts that add up."""

from __future__ import annotations

import numpy as np
import pytest

from rannc_backend.cost.cluster import local_cpu
from rannc_backend.cost.expressions import evaluate, value_bytes
from rannc_backend.partition.stage_costs import StageCosts, useful_micro_batches
from tests.unit.rannc_backend.block_models import blocks_of, model, staged_graph


def interval_costs(name: str, num_devices: int = 4, rows: int = 16) -> StageCosts:
    return StageCosts(
        graph=blocks_of(name, 12), cluster=local_cpu(num_devices, memory_bytes=10**9), batch_rows=rows,
        micro_batches=useful_micro_batches(rows, 1, 8), schedule="1f1b", optimizer_factor=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tied", "normalized"])
def test_intervals_hold_the_parameters_and_receive_the_values_that_a_cut_gives_them(name: str) -> None:
    costs = interval_costs(name)
    graph, staged = costs.graph, staged_graph(name)
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    sizes = {use.name: use.num_bytes for use in graph.parameters}
    batch = {item.name for item in model(name).inputs if item.kind == "batch"}
    for begin in range(len(graph.blocks)):
        for end in range(begin + 1, len(graph.blocks) + 1):
            inside = {n for n in staged.nodes if begin <= block_of[n.name] < end}
            names = {name for block in graph.blocks[begin:end] for name in block.parameters}
            others = {name for block in graph.blocks[:begin] + graph.blocks[end:] for name in block.parameters}
            assert costs.parameter_bytes[begin, end] == sum(sizes[name] for name in names)
            assert costs.shared_bytes[begin, end] == sum(sizes[name] for name in names & others)
            read = {a for n in inside for a in n.all_input_nodes if (a in staged.reads and a not in inside) or a.name in batch}
            received = evaluate([value_bytes(n.meta["val"]) for n in read], costs.rows.tolist()).sum(axis=0) if read else 0
            np.testing.assert_allclose(costs.received[begin, end], received)
            kept = {n for n in inside if any(u in staged.reads and u not in inside for u in n.users)}
            sent = evaluate([value_bytes(n.meta["val"]) for n in kept], costs.rows.tolist()).sum(axis=0) if kept else 0
            np.testing.assert_allclose(costs.sent[begin, end], sent)


def test_the_parts_of_a_stage_add_up_to_what_the_search_compares() -> None:
    costs = interval_costs("tied")
    problem = costs.problem(1e9)
    for begin, end, replicas, number, to_end in [(0, 3, 2, 4, 2), (2, 7, 1, 8, 1), (0, len(costs.graph.blocks), 4, 1, 1)]:
        parts = costs.stage_cost(begin, end, replicas, number, to_end)
        place = (begin, end, replicas)
        tables = costs.tables(number)
        total = parts.forward_seconds + parts.backward_seconds + parts.transfer_seconds
        assert total == pytest.approx(tables.seconds[place], rel=1e-4)
        assert parts.allreduce_seconds == pytest.approx(problem.allreduce_seconds[place], rel=1e-4)
        in_flight = min(number, to_end)
        compared = tables.fixed_bytes[place] + in_flight * tables.flight_bytes[place]
        assert 0 <= parts.peak_bytes - compared <= 5 + in_flight  # each part is rounded up, and none is left out


def test_only_useful_numbers_of_micro_batches_are_tried() -> None:
    assert useful_micro_batches(8, 1, 32) == (1, 2, 3, 4, 8)
    assert useful_micro_batches(8, 3, 3) == (3,)
    assert useful_micro_batches(3, 8, 8) == (3,)
    assert useful_micro_batches(1, 1, 32) == (1,)
