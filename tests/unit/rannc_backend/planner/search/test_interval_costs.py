"""Costs of runs of blocks: what a cut gives them, and parts that add up to what the search compares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.cost.tensor_sizes import value_bytes
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.planner.search.moves import useful_micro_batches
from tests.unit.rannc_backend.planner.blocks.block_models import blocks_of, model, staged_graph
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import generic_gpu, local_cpu


def interval_costs(name: str, num_devices: int = 4, rows: int = 16, **others: object) -> IntervalCosts:
    cluster = local_cpu(num_devices, memory_bytes=10**9)
    cluster = replace(cluster, device=replace(cluster.device, communicator_bytes=1000))
    others.setdefault("graph", blocks_of(name, 12))
    return IntervalCosts(
        cluster=cluster, batch_rows=rows, micro_batches=useful_micro_batches(rows, 1, 8),
        pricer=AnalyticPricer(device=cluster.device), optimizer_factor=2.0, **others,
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
            others = {
                name for block in graph.blocks[:begin] + graph.blocks[end:] for name in block.parameters
            }
            assert costs.sums.parameters[begin, end - begin - 1] == sum(sizes[name] for name in names)
            assert costs.sums.shared[begin, end - begin - 1] == sum(sizes[name] for name in names & others)
            read = {
                a
                for n in inside
                for a in n.all_input_nodes
                if (a in staged.reads and a not in inside) or a.name in batch
            }
            received = (
                evaluate([value_bytes(n.meta["val"]) for n in read], [1, 8]).sum(axis=0)
                if read
                else np.zeros(2)
            )
            np.testing.assert_allclose(costs.message_bytes(begin, end, [1, 8])[0], received)


@pytest.mark.parametrize("place", [(0, 3, 2, 4), (2, 7, 1, 8), (0, None, 4, 1)])
@pytest.mark.parametrize("only_budget", [None, 0.0, 0.5])
@pytest.mark.parametrize("update_groups", [None, 1, 3])
def test_the_parts_of_a_stage_are_what_the_search_compares(
    place: tuple, only_budget: float | None, update_groups: int | None
) -> None:
    costs = interval_costs("tied", only_budget=only_budget, update_groups=update_groups)
    begin, end, replicas, number = place
    end = len(costs.graph.blocks) if end is None else end
    tables = costs.tables(number)
    option = tables.replicas.tolist().index(replicas)
    where = (begin, end - begin - 1, option)
    rows = [costs.replica_rows(number, replicas)]
    assert tables.rows[option] == rows[0]
    for index, budget in enumerate(costs.budgets):
        prices, memory = (
            costs.prices(begin, end, budget, rows),
            costs.memory(begin, end, budget, number, replicas),
        )
        assert prices.forward_seconds[0] == pytest.approx(tables.forward[where])
        assert prices.backward_seconds[0] == pytest.approx(tables.backward[index][where])
        fixed = memory.parameters + memory.gradients + memory.optimizer + memory.buffers + memory.workspace
        assert fixed == pytest.approx(tables.fixed_bytes[index][where])
        assert memory.activations == pytest.approx(tables.flight_bytes[index][where])
    received, gradients = costs.message_bytes(begin, end, rows)
    assert (received[0], gradients[0]) == pytest.approx(
        (tables.message_bytes[where], tables.gradient_bytes[where])
    )


def test_sums_of_gradients_in_float32_are_counted_beside_what_is_rounded_from_them() -> None:
    """Parameters of 16 bits: per byte two of sums, which are reduced, and one in the parameter's dtype."""
    plain = interval_costs("tied")
    uses = tuple(
        replace(use, has_wide_sum=place % 2 == 0) for place, use in enumerate(plain.graph.parameters)
    )
    wide = interval_costs("tied", graph=replace(plain.graph, parameters=uses))
    sizes = {use.name: (use.num_bytes, use.has_wide_sum) for use in uses if use.trainable}
    for begin, end in ((0, 3), (2, 7), (0, len(plain.graph.blocks))):
        names = {name for block in plain.graph.blocks[begin:end] for name in block.parameters} & sizes.keys()
        place = (begin, end - begin - 1)
        assert wide.sums.gradients[place] == sum(
            sizes[name][0] * (3 if sizes[name][1] else 1) for name in names
        )
        assert wide.sums.reduced[place] == sum(
            sizes[name][0] * (2 if sizes[name][1] else 1) for name in names
        )
        before, after = (costs.memory(begin, end, 1.0, 2, 2) for costs in (plain, wide))
        added = wide.sums.gradients[place] - plain.sums.gradients[place]
        assert added > 0 and after.gradients - before.gradients == added
        assert (after.parameters, after.optimizer) == (before.parameters, before.optimizer)
        tables = [costs.tables(2) for costs in (plain, wide)]
        option = tables[0].replicas.tolist().index(2)
        fixed = [table.fixed_bytes[0][(*place, option)] for table in tables]
        assert fixed[1] - fixed[0] >= added


def test_optimizer_state_is_divided_among_the_replicas_of_a_group() -> None:
    number = len(interval_costs("normalized").graph.blocks)
    kept = {
        groups: [
            interval_costs("normalized", update_groups=groups).memory(0, number, 1.0, 1, count).optimizer
            for count in (1, 2, 4)
        ]
        for groups in (None, 1, 2, 4)
    }
    whole = kept[None][0]
    assert kept[None] == [whole] * 3 == kept[4] and kept[1][0] == kept[2][0] == kept[2][1] == whole
    assert whole > kept[1][1] >= whole / 2 and kept[1][1] > kept[1][2] >= whole / 4
    assert kept[2][2] == kept[1][1]


def test_communicators_take_memory_of_their_device() -> None:
    costs = interval_costs("tied")
    number = len(costs.graph.blocks)

    def buffers(place: tuple[int, int, int], communicator_bytes: int, num_devices: int) -> float:
        device = replace(costs.cluster.device, communicator_bytes=communicator_bytes)
        costs.cluster = replace(costs.cluster, device=device, num_devices=num_devices)
        costs.shared = replace(costs.shared, cluster=costs.cluster)
        begin, end, replicas = place
        return costs.memory(begin, end, 1.0, 1, replicas).buffers

    def taken(*place: int, num_devices: int = costs.cluster.num_devices) -> float:
        return buffers(place, 1000, num_devices) - buffers(place, 0, num_devices)  # type: ignore[arg-type]

    # Of all ranks, of the stages beside it, of the replicas where those are not all ranks.
    assert [taken(0, 3, 1), taken(2, 3, 1), taken(2, 3, 2), taken(0, number, 4)] == [3000, 4000, 5000, 2000]
    assert taken(0, number, 1, num_devices=1) == 0


def test_recomputing_everything_keeps_what_is_received_and_runs_forward_twice() -> None:
    costs = interval_costs("tied")
    keep, nothing = (costs.prices(2, 7, budget, [4]) for budget in (1.0, 0.0))
    assert nothing.backward_seconds == pytest.approx(keep.backward_seconds + keep.forward_seconds)
    assert nothing.saved_bytes[0] == 0 < keep.saved_bytes[0]
    assert nothing.workspace_bytes == pytest.approx(keep.workspace_bytes + keep.saved_bytes)


def test_stages_beyond_the_memory_are_not_priced_and_the_others_cost_the_same() -> None:
    whole = interval_costs("tied")
    most = float(whole.sums.parameters[0, 3] + 3 * whole.sums.trainable[0, 3])
    small = interval_costs("tied", most_bytes=most)
    assert small.max_length < whole.max_length
    np.testing.assert_allclose(small.tables(4).forward, whole.tables(4).forward[:, : small.max_length])
    np.testing.assert_allclose(
        small.tables(4).message_bytes, whole.tables(4).message_bytes[:, : small.max_length]
    )


def test_tables_know_stages_as_long_as_asked_for_and_cost_the_same() -> None:
    whole, short = interval_costs("tied").tables(4), interval_costs("tied")
    for asked, expected in ((2, 2), (3, 3), (2, 2)):
        known = short.tables(4, asked)
        assert known.forward.shape[1] == expected
        for name in ("forward", "message_bytes", "gradient_bytes"):
            np.testing.assert_array_equal(
                getattr(known, name), getattr(whole, name)[:, : known.forward.shape[1]]
            )
        for name in ("backward", "fixed_bytes", "flight_bytes"):
            np.testing.assert_array_equal(
                getattr(known, name), getattr(whole, name)[:, :, : known.forward.shape[1]]
            )


def test_of_replica_counts_with_equally_many_rows_the_fewest_are_tried() -> None:
    costs = interval_costs("tied", num_devices=12, rows=12, replica_counts=(7,))
    assert costs.counts(1).tolist() == [1, 2, 3, 4, 6, 7, 12]
    assert costs.counts(6).tolist() == [1, 2]
    nodes = generic_gpu(12, devices_per_node=4, device_name="gpu", memory_bytes=10**9, num_multiprocessors=1)
    filling = IntervalCosts(
        graph=costs.graph,
        cluster=nodes,
        batch_rows=12,
        micro_batches=(1,),
        pricer=costs.pricer,
        optimizer_factor=2.0,
    )
    assert filling.counts(1).tolist() == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
    ]  # 8 ranks fill two nodes, with as many rows as 6


def test_only_useful_numbers_of_micro_batches_are_tried() -> None:
    assert useful_micro_batches(8, 1, 32) == (1, 2, 3, 4, 8)
    assert useful_micro_batches(8, 3, 3) == (3,)
    assert useful_micro_batches(3, 8, 8) == (3,)
    assert useful_micro_batches(1, 1, 32) == (1,)


def test_nobody_waits_for_the_backward_of_a_first_stage() -> None:
    """All of it may be run later; of another stage, what sums gradients of parameters."""
    costs = interval_costs("normalized")
    tables = costs.tables(4)
    least = tables.backward.min(axis=0)
    fits = np.isfinite(least)
    assert (tables.weight[0] == least[0])[fits[0]].all()
    assert (tables.weight[1:] < least[1:])[fits[1:]].any()
    assert (tables.weight[1:] <= least[1:])[fits[1:]].all()
