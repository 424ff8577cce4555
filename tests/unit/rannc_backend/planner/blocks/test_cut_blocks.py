"""Blocks cover the graph in order, are cut where little crosses, and their flows are what a cut really
carries.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.block_graph import INPUT_BLOCK
from rannc_backend.planner.blocks.cut_blocks import build_block_graph
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_models import ROWS, blocks_of, model, staged_graph
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import plan_stages


@pytest.mark.parametrize(
    ("name", "max_blocks"),
    [
        ("gpt2", 10),
        ("gpt2", 160),
        *((name, most) for name in ("tied", "normalized") for most in (1, 3, 10, 160, 1000)),
    ],
)
def test_blocks_cover_the_staged_nodes_in_order(name: str, max_blocks: int) -> None:
    graph = blocks_of(name, max_blocks)
    assert len(graph.blocks) <= max_blocks
    assert sorted(node for block in graph.blocks for node in block.nodes) == sorted(
        node.name for node in staged_graph(name).nodes
    )
    for block in graph.blocks:
        assert {node.name for node in staged_graph(name).nodes} >= set(block.nodes) and len(
            block.operators
        ) >= len(block.nodes)
    assert [block.index for block in graph.blocks] == list(range(len(graph.blocks)))


@pytest.mark.parametrize("name", ["gpt2", "tied", "normalized"])
def test_flows_are_the_values_that_cross_between_blocks(name: str) -> None:
    graph = blocks_of(name, 12)
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    expected: dict[str, tuple[int, set[int]]] = {}
    for node in model(name).split.rowwise.graph.nodes:
        producer = block_of.get(node.name, INPUT_BLOCK)
        readers = {block_of[user.name] for user in node.users if user.name in block_of} - {producer}
        is_input = node.op == "placeholder" and node.name in {
            i.name for i in model(name).inputs if i.kind == "batch"
        }
        if readers and (is_input or node.name in block_of):
            expected[node.name] = (producer, readers)
    assert {flow.name: (flow.producer, set(flow.consumers)) for flow in graph.flows} == expected
    for flow in graph.flows:
        assert flow.needs_grad == (flow.name in model(name).needs_grad)


def test_layers_end_where_blocks_end() -> None:
    graph = blocks_of("gpt2", 20)
    lasts = {block.modules[-1] for block in graph.blocks if block.modules}
    assert {f"transformer.h.{layer}" for layer in range(4)} <= lasts, [
        block.modules for block in graph.blocks
    ]
    # Only the hidden state crosses the end of a layer.
    for block in graph.blocks:
        if (
            block.modules[-1:]
            and block.modules[-1] in {"transformer.h.0", "transformer.h.1"}
            and "mlp" in " ".join(block.modules)
        ):
            crossing = [f for f in graph.flows if 0 <= f.producer <= block.index < f.consumers[-1]]
            assert len(crossing) == 1


def test_tied_parameters_are_one_and_in_both_blocks() -> None:
    graph = blocks_of("tied")
    readers = [block.index for block in graph.blocks if "table.weight" in block.parameters]
    assert len(readers) == 2 and readers[0] == 0
    assert [use.name for use in graph.parameters] == sorted(use.name for use in graph.parameters)
    assert {use.name: use.num_bytes for use in graph.parameters}["table.weight"] == 11 * 4 * 4


def test_batch_statistics_never_cross_a_cut() -> None:
    graph = blocks_of("normalized")
    staged = staged_graph("normalized")
    block_of = {node: block.index for block in graph.blocks for node in block.nodes}
    assert staged.fixed, "the model has no batch statistics: nothing is tested"
    for node in staged.fixed:
        assert {block_of[user.name] for user in node.users if user.name in block_of} <= {block_of[node.name]}
    updated = [name for block in graph.blocks for name in block.updated_buffers]
    assert sorted(updated) == [
        f"layers.{n}.{b}" for n in (1, 4) for b in ("num_batches_tracked", "running_mean", "running_var")
    ]


def test_a_value_that_is_not_row_wise_keeps_its_readers_in_its_block() -> None:
    item, staged = model("tied"), staged_graph("tied")
    source = next(node for node in staged.nodes if "tanh" in node.name)
    build = functools.partial(
        build_block_graph, inputs=item.inputs, outputs=item.split.outputs, needs_grad=item.needs_grad,
        device=local_cpu(1, memory_bytes=1).device, rows=ROWS,
    )  # fmt: skip

    def blocks_with(fixed: frozenset) -> set[int]:
        graph = build(replace(staged, fixed=fixed))
        block_of = {node: block.index for block in graph.blocks for node in block.nodes}
        return {block_of[node.name] for node in [source, *source.users]}

    assert len(blocks_with(frozenset())) > 1
    assert len(blocks_with(frozenset([source]))) == 1


def test_plans_have_the_stages_that_the_user_asked_for() -> None:
    item = model("gpt2")
    modules = {node.name: str(node.meta.get("module_path", "")) for node in staged_graph("gpt2").nodes}
    config = Config(
        stage_starts="transformer.h.1.mlp",
        keep_together="transformer.h.2",
        stage_pins="transformer.h.0=0,lm_head=3",
    )
    plan = plan_stages(
        item.split, item.inputs, item.needs_grad, config, world_size=6, batch_rows=8, fingerprint="f" * 64,
        cluster=local_cpu(6, memory_bytes=8 * BYTES_PER_GB),
    )  # fmt: skip
    stage_of = {node: stage.index for stage in plan.stages for node in stage.nodes}

    def stages(name: str) -> set[int]:
        return {stage_of[node] for node, path in modules.items() if f"{path}.".startswith(f"{name}.")}

    assert plan.num_stages >= 4 and stages("transformer.h.0") == {0} and stages("lm_head") == {3}
    assert len(stages("transformer.h.2")) == 1
    first = next(node for node, path in modules.items() if path.startswith("transformer.h.1.mlp"))
    earlier = [node for node, path in modules.items() if path.startswith("transformer.h.1.attn")]
    assert min(stages("transformer.h.1.mlp")) == stage_of[first] > max(stage_of[node] for node in earlier)
