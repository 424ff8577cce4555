"""Whole plans on real graphs: what is forced is obeyed, what does not fit is refused with numbers, and plans
can be cut.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.passes.stage.split_stages import StageGraph, split_stages
from rannc_backend.planner.blocks.partitions import partitions_of
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.transfer import ring_terms
from rannc_backend.planner.projection import stage_of_plan
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.settings.options import Config
from tests.choice import mostly
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import generic_gpu, local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import (
    Chain,
    Filters,
    SplitModel,
    bert,
    gpt2,
    plan_stages,
    split_model,
)


class OneOperator(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Penalized(nn.Module):
    """A parameter (`gain`) that reaches an output through constant nodes alone, and a loss that is not linear
    in its sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).square().mean().sqrt(), self.gain * 2


@functools.lru_cache
def model(name: str) -> SplitModel:
    if name in ("gpt2", "bert"):
        module, batch = {"gpt2": gpt2, "bert": bert}[name](num_layers=2)
        return split_model(module, batch)
    if name == "filters":
        return split_model(Filters(), {"x": torch.randn(4, 3, 8, 8)})
    module = {"chain": Chain, "one": OneOperator, "identity": Identity, "penalized": Penalized}[name]()
    return split_model(module, {"x": torch.randn(4, 4 if name == "penalized" else 64)})


def make_plan(
    name: str, world_size: int, rows: int = 16, cluster: Cluster | None = None, **options: object
) -> Plan:
    item = model(name)
    return plan_stages(
        item.split,
        item.inputs,
        item.needs_grad,
        Config(**options),
        world_size=world_size,
        batch_rows=rows,
        fingerprint="f" * 64,
        cluster=cluster or local_cpu(world_size, memory_bytes=8 * BYTES_PER_GB),
        model_name=name,
    )


def cut(name: str, plan: Plan) -> tuple[StageGraph, ...]:
    """What passes/stage/split_stages.py makes of the plan."""
    item = model(name)
    split = item.split
    stages = stage_of_plan(plan, split.rowwise, split.layouts, item.inputs)
    kinds = {spec.name: spec.kind for spec in item.inputs}
    kinds |= {kind: kind for kind in ("rng_seed", "first_row", "global_rows")}
    symbols = set().union(
        *(size.node.expr.free_symbols for node in split.rowwise.graph.find_nodes(op="placeholder") if node.name in kinds
          for size in node.meta["val"].shape if isinstance(size, torch.SymInt))
    )  # fmt: skip
    return split_stages(
        split.rowwise,
        split.outputs,
        split.layouts,
        stages,
        plan.num_stages,
        input_kinds=kinds,
        rows_symbol=symbols.pop(),
    )


CASES = [
    ("gpt2", 1, {}),
    ("gpt2", 4, {"partition_num": 4}),
    ("gpt2", 4, {"stage_replicas": "1,3"}),
    ("gpt2", 4, {"stage_replicas": "2,1,1"}),
    ("gpt2", 8, {"partition_num": 2, "pipeline_num": 3}),
    ("bert", 3, {"partition_num": 3}),
    ("bert", 4, {"stage_replicas": "3,1", "pipeline_num": 2}),
    ("chain", 6, {"partition_num": 6}),
    ("chain", 4, {"replica_num": 2}),
    ("filters", 4, {"partition_num": 4}),
    ("one", 4, {"partition_num": 4}),
    ("penalized", 2, {"partition_num": 2}),
]


@pytest.mark.parametrize(
    ("name", "world_size", "options"), mostly(CASES, [case for case in CASES if case[0] != "bert"]), ids=str
)
def test_plans_are_whole_and_can_be_cut(name: str, world_size: int, options: dict) -> None:
    plan = make_plan(name, world_size, **options)
    assert Plan.from_json(plan.to_json()) == plan
    used = sorted(rank for stage in plan.stages for rank in stage.ranks)
    assert used == list(range(len(used))) and len(used) <= world_size
    for before, after in zip(plan.stages, plan.stages[1:]):
        assert after.ranks[0] == before.ranks[-1] + 1
    if "stage_replicas" in options:
        assert ",".join(map(str, plan.stage_replicas)) == options["stage_replicas"]
    if "pipeline_num" in options:
        assert plan.num_micro_batches == options["pipeline_num"]
    if "replica_num" in options:
        assert set(plan.stage_replicas) == {options["replica_num"]}
    if "partition_num" in options and name not in ("one", "penalized"):
        assert plan.num_stages == options["partition_num"]
    names = model(name).parameter_names
    for stage, graph in zip(plan.stages, cut(name, plan), strict=True):
        held = {names[item.name] for item in graph.inputs if item.kind == "parameter"}
        assert held == set(stage.parameters)
        updated = {item.fqn for item in graph.outputs if item.kind == "buffer"}
        assert updated == set(stage.updated_buffers)


def test_the_same_question_gives_the_same_bytes() -> None:
    texts = {make_plan("gpt2", 4, partition_num=2).to_json() for _ in range(2)}
    assert len(texts) == 1
    again = split_model(*gpt2(num_layers=2))
    plan = plan_stages(
        again.split, again.inputs, again.needs_grad, Config(partition_num=2), world_size=4, batch_rows=16,
        fingerprint="f" * 64, cluster=local_cpu(4, memory_bytes=8 * BYTES_PER_GB), model_name="gpt2",
    )  # fmt: skip
    assert texts == {plan.to_json()}


def test_one_process_gets_one_stage_and_one_micro_batch_unless_memory_forces_more() -> None:
    plan = make_plan("gpt2", 1, rows=64)
    assert (plan.num_stages, plan.num_micro_batches) == (1, 1)
    need = plan.stages[0].predicted.peak_bytes / BYTES_PER_GB
    tight = make_plan("gpt2", 1, rows=64, mem_limit_gb=0.5 * need / 0.9)
    assert tight.num_stages == 1 and tight.num_micro_batches > 1
    assert tight.stages[0].predicted.peak_bytes <= 0.5 * need * BYTES_PER_GB
    assert "twice the memory by" in tight.binding and "twice the memory by nothing" not in tight.binding
    assert plan.stages[0].predicted.transfer_seconds == plan.stages[0].predicted.allreduce_seconds == 0


def test_the_memory_limit_is_hard_and_its_error_says_what_would_do() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan("chain", 2, rows=4, mem_limit_gb=1e-5)
    error = caught.value
    assert (
        error.smallest_bytes is not None and error.smallest_num_devices is None
    )  # no layer fits on any number of them
    enough = error.smallest_bytes / BYTES_PER_GB
    plan = make_plan("chain", 2, rows=4, mem_limit_gb=enough * 1.0001)
    assert max(stage.predicted.peak_bytes for stage in plan.stages) <= enough * 0.9001 * BYTES_PER_GB
    with pytest.raises(InfeasiblePlanError):
        make_plan("chain", 2, rows=4, mem_limit_gb=enough * 0.999)


def test_the_smallest_number_of_devices_would_do() -> None:
    limit = 0.00014  # a layer with its optimizer state is 67 kB
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan("chain", 1, mem_limit_gb=limit, rows=8)
    count = caught.value.smallest_num_devices
    assert count is not None and count > 1
    assert make_plan("chain", count, mem_limit_gb=limit, rows=8).num_stages > 1
    with pytest.raises(InfeasiblePlanError):
        make_plan("chain", count - 1, mem_limit_gb=limit, rows=8)


def test_smaller_micro_batches_that_would_do_are_named() -> None:
    make = functools.partial(make_plan, recompute="1")
    need = make("chain", 1, rows=4096, pipeline_num=64).stages[0].predicted.peak_bytes / BYTES_PER_GB
    limit = need / 0.9 * 1.0001
    with pytest.raises(InfeasiblePlanError, match="smaller micro-batches: max_pipeline=") as caught:
        make("chain", 1, rows=4096, max_pipeline=4, mem_limit_gb=limit)
    number = caught.value.smallest_max_pipeline
    assert number is not None and 4 < number <= 64
    assert make("chain", 1, rows=4096, max_pipeline=number, mem_limit_gb=limit).num_micro_batches == number
    with pytest.raises(InfeasiblePlanError) as caught:
        make("chain", 1, rows=4096, pipeline_num=4, mem_limit_gb=limit)
    assert caught.value.smallest_max_pipeline is None, "the number was asked for"


def test_divided_optimizer_state_that_would_do_is_named() -> None:
    make = functools.partial(make_plan, "gpt2", 4, rows=64, replica_num=4, recompute="1", pipeline_num=1)
    need = make(zero_stage=1).stages[0].predicted.peak_bytes / BYTES_PER_GB
    with pytest.raises(InfeasiblePlanError, match="other options: .*without zero_stage=0") as caught:
        make(mem_limit_gb=need / 0.9 * 1.0001, zero_stage=0)
    assert "without zero_stage=0" in caught.value.options_that_would_do
    assert make(mem_limit_gb=need / 0.9 * 1.0001, zero_stage=1).stage_replicas == (4,)
    with pytest.raises(InfeasiblePlanError) as caught:
        make(mem_limit_gb=0.5 * need)
    assert not any("zero_stage" in option for option in caught.value.options_that_would_do)
    free = make(mem_limit_gb=need / 0.9 * 1.0001)
    assert free.zero_stage == 1 and free.stage_replicas == (4,)
    (lost,) = (item for item in free.alternatives if item.reason.startswith("without ZeRO"))
    assert lost.predicted_step_seconds is None and "nothing fits" in lost.reason


@pytest.mark.parametrize(("replicas", "groups"), [(2, 1), (4, 1), (4, 2)])
def test_new_values_are_in_the_step(replicas: int, groups: int) -> None:
    """One owner of a gradient takes half of an all-reduce, and sends what is half of one of its group."""
    cluster = local_cpu(replicas, memory_bytes=64 * BYTES_PER_GB)
    asked = {"replica_num": replicas, "pipeline_num": 1, "schedule": "fill_drain", "recompute": "1"}
    make = functools.partial(make_plan, "gpt2", replicas, rows=64, cluster=cluster, **asked)
    plain = make(zero_stage=0)
    divided = make(zero_stage=1, zero_ngroups=groups)
    before, cost = plain.stages[0].predicted, divided.stages[0].predicted
    assert before.new_values_seconds == before.elsewhere_bytes == 0
    share = 1 if groups > 1 else 2
    assert cost.allreduce_seconds == pytest.approx(before.allreduce_seconds / share, rel=1e-4)
    latency, rate = ring_terms(cluster.intra_node, replicas // groups)
    values = before.parameter_bytes
    assert cost.new_values_seconds == pytest.approx((latency + values * rate) / 2, rel=0.01)
    assert divided.predicted_step_seconds == pytest.approx(simulate_plan(divided).step_seconds, rel=1e-4)
    if groups > 1:
        later = divided.predicted_step_seconds - plain.predicted_step_seconds
        assert later == pytest.approx(cost.new_values_seconds, rel=1e-3)
    else:
        # Nothing is lost where all-reduces do not run beside computing; else what can no longer do so.
        assert divided.predicted_step_seconds >= plain.predicted_step_seconds * (1 - 1e-5)
    freed = before.optimizer_bytes - cost.optimizer_bytes
    assert cost.elsewhere_bytes == pytest.approx(freed, abs=2) and freed > 0


def test_more_memory_or_more_devices_are_never_slower() -> None:
    seconds = [
        make_plan("gpt2", 4, rows=32, mem_limit_gb=limit).predicted_step_seconds
        for limit in (0.002, 0.004, 0.1)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    gpu = functools.partial(
        generic_gpu,
        devices_per_node=8,
        device_name="gpu",
        memory_bytes=BYTES_PER_GB,
        num_multiprocessors=1,
        clock_hertz=1e7,
    )
    seconds = [
        make_plan("gpt2", count, rows=64, cluster=gpu(count)).predicted_step_seconds for count in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("options", "world_size", "needed"),
    [
        ({"partition_num": 4}, 2, 4),
        ({"partition_num": 2, "replica_num": 2}, 3, 4),
        ({"stage_replicas": "1,3"}, 2, 4),
    ],
)
def test_settings_that_need_more_ranks_are_refused(options: dict, world_size: int, needed: int) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan("chain", world_size, **options)
    assert caught.value.smallest_num_devices == needed
    assert next(iter(options)) in str(caught.value)


def test_settings_that_the_model_or_the_batch_is_too_small_for_are_lowered_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = make_plan("one", 4, rows=2, partition_num=3, pipeline_num=8)
    assert (plan.num_stages, plan.num_micro_batches) == (1, 2)
    assert "partition_num 3" in caplog.text and "8 micro-batches are too many" in caplog.text
    # One block and one row per micro-batch: only one rank has work.
    assert plan.stage_replicas == (1,) and "only 1 of 4 ranks" in caplog.text


def test_replicas_get_a_row_each() -> None:
    plan = make_plan("chain", 6, rows=2)
    assert max(plan.stage_replicas) <= 2 and sum(plan.stage_replicas) <= 6


def test_a_model_that_computes_nothing_has_one_stage_without_nodes() -> None:
    plan = make_plan("identity", 3)
    assert plan.num_stages == 1 and plan.stages[0].nodes == () and plan.stages[0].ranks == (0, 1, 2)
    assert len(cut("identity", plan)) == 1


@pytest.mark.parametrize(
    ("name", "option", "expected"),
    [
        ("gpt2", "auto", "1f1b"),
        ("gpt2", "fill_drain", "fill_drain"),
        ("chain", "auto", "fill_drain"),
        ("chain", "1f1b", "fill_drain"),
        ("penalized", "auto", "fill_drain"),
    ],
)
def test_the_schedule_is_1f1b_where_that_is_exact(name: str, option: str, expected: str) -> None:
    assert make_plan(name, 2, schedule=option).schedule == expected


def test_1f1b_needs_less_memory_than_fill_drain() -> None:
    peaks = []
    for schedule in ("1f1b", "fill_drain"):
        plan = make_plan("gpt2", 2, rows=32, schedule=schedule, partition_num=2, pipeline_num=8)
        peaks.append([stage.predicted.activation_bytes for stage in plan.stages])
    ratios = [late / early for early, late in zip(*peaks)]
    assert ratios == pytest.approx([4, 8], rel=0.35)


def test_what_wins_is_said_with_what_lost() -> None:
    plan = make_plan("gpt2", 4)
    assert "stage 0" in plan.binding and "all-reduce" in plan.binding
    assert plan.alternatives
    for other in plan.alternatives:
        assert other.num_stages != plan.num_stages == 1
        assert (
            other.predicted_step_seconds is None
            or other.predicted_step_seconds >= plan.predicted_step_seconds
        )
    assert "gpt2 for 4 rank(s): 1 stage(s)" in plan.summary() and "ranks 0-3" in plan.summary()


def test_outputs_that_stay_need_no_memory() -> None:
    loss_only, everything = (
        make_plan("gpt2", 2, outputs=outputs, stage_replicas="1,1", pipeline_num=2)
        for outputs in ("loss", "all")
    )
    assert loss_only.stages[1].predicted.buffer_bytes < everything.stages[1].predicted.buffer_bytes


@pytest.mark.parametrize(("name", "recompute"), [("gpt2", "0"), ("gpt2", "1"), ("gpt2", "0.5")])
def test_the_activation_budget_can_be_fixed(name: str, recompute: str) -> None:
    plan = make_plan(name, 2, stage_replicas="1,1", recompute=recompute)
    assert {stage.recompute for stage in plan.stages} == {float(recompute)}


def test_memory_decides_how_much_is_recomputed() -> None:
    asked = {"stage_replicas": "1,1", "pipeline_num": 8, "schedule": "fill_drain"}
    roomy = make_plan("gpt2", 2, rows=64, **asked)
    need = max(stage.predicted.peak_bytes for stage in roomy.stages) / BYTES_PER_GB
    tight = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.6 * need / 0.9, **asked)
    assert {stage.recompute for stage in roomy.stages} == {1.0}
    assert min(stage.recompute for stage in tight.stages) < 1.0
    assert tight.predicted_step_seconds > roomy.predicted_step_seconds
    assert max(stage.predicted.peak_bytes for stage in tight.stages) <= 0.6 * need * BYTES_PER_GB
    assert tight.what_if[1].predicted_step_seconds == pytest.approx(roomy.predicted_step_seconds, rel=1e-3)


# All that a stage receives counts as kept: too much for a small stage that keeps none of it, never too
# little.
@pytest.mark.parametrize(
    ("name", "num_stages", "most"),
    mostly(
        [("gpt2", 3, 1.4), ("bert", 1, 1.05), ("filters", 1, 1.05), ("filters", 3, float("inf"))],
        [("gpt2", 3, 1.4), ("filters", 1, 1.05), ("filters", 3, float("inf"))],
    ),
)
def test_activations_are_estimated_near_what_the_compiled_stage_saves(
    name: str, num_stages: int, most: float
) -> None:
    item, rows = model(name), 16
    plan = make_plan(name, num_stages, rows=rows, partition_num=num_stages, pipeline_num=1)
    batch = next(
        node
        for node in item.split.rowwise.graph.find_nodes(op="placeholder")
        if node.name == item.inputs[-1].name
    )
    symbol = next(iter(batch.meta["val"].shape[0].node.expr.free_symbols))
    for stage, graph in zip(plan.stages, cut(name, plan), strict=True):
        (exact,) = partitions_of(
            graph,
            needs_grad=item.needs_grad,
            requires_grad_parameters=frozenset(spec.name for spec in item.inputs if spec.requires_grad),
            rows_symbol=symbol,
            compiler="eager",
        )
        ratio = stage.predicted.activation_bytes / float(exact.saved_bytes.subs(exact.rows_symbol, rows))
        assert 0.97 <= ratio <= most, f"stage {stage.index}: {ratio}"


def test_a_slow_network_is_avoided(caplog: pytest.LogCaptureFixture) -> None:
    slow = local_cpu(4, memory_bytes=8 * BYTES_PER_GB)
    slow = replace(slow, intra_node=replace(slow.intra_node, bytes_per_second=1e3))
    with caplog.at_level(logging.WARNING):
        plan = make_plan("chain", 4, rows=4096, cluster=slow, outputs="loss")
    fast = make_plan("chain", 4, rows=4096, outputs="loss")
    assert plan.stage_replicas == (1,) and "only 1 of 4 ranks" in caplog.text
    assert sum(fast.stage_replicas) > 1 and plan.predicted_step_seconds > fast.predicted_step_seconds


def test_the_plan_is_never_slower_than_an_equal_split() -> None:
    for options in ({}, {"partition_num": 4}, {"partition_num": 2, "schedule": "fill_drain"}):
        plan = make_plan("gpt2", 4, rows=64, **options)
        assert plan.equal_split_seconds is not None
        assert plan.predicted_step_seconds <= plan.equal_split_seconds


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {"partition_num": 3}), ("fill_drain", {"stage_replicas": "2,1,1"})]
)
def test_the_predicted_step_is_that_of_the_simulated_plan(schedule: str, options: dict) -> None:
    plan = make_plan("gpt2", 4, rows=32, schedule=schedule, **options)
    assert simulate_plan(plan).step_seconds == pytest.approx(plan.predicted_step_seconds, rel=1e-3)
