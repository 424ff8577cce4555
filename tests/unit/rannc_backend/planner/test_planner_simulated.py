"""What the planner predicts is what the simulation of its plan gives, on real graphs; and such plans can be
shown.
"""

from __future__ import annotations

import functools

import pytest

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.report.modules import module_tree, stage_modules
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, gpt2, plan_stages, split_model


@functools.lru_cache
def model() -> SplitModel:
    return split_model(*gpt2(num_layers=2))


def make_plan(world_size: int, cluster_name: str | None = None, **options: object) -> Plan:
    local = local_cpu(world_size, memory_bytes=8 * BYTES_PER_GB)
    item = model()
    return plan_stages(
        item.split, item.inputs, item.needs_grad, Config(**options), world_size=world_size, batch_rows=48, fingerprint="f" * 64,
        cluster=load_cluster(cluster_name, world_size, 2) if cluster_name else local, model_name="gpt2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "cluster", "options"),
    [
        (1, None, {}),
        (4, None, {"partition_num": 4}),
        (4, None, {"stage_replicas": "2,1,1"}),
        (4, None, {"partition_num": 2, "schedule": "fill_drain"}),
        (4, "v100-32gb", {"partition_num": 4, "pipeline_num": 6}),
        (6, "a100-80gb", {"stage_replicas": "3,3"}),
        (4, "v100-32gb", {"partition_num": 4, "pipeline_num": 6, "offload": "parameters"}),
        (2, None, {"schedule": "interleaved", "offload": "parameters"}),
        (4, None, {"partition_num": 4, "schedule": "list_scheduled", "offload": "parameters"}),
    ],
)
def test_the_predicted_step_is_the_simulated_one(world_size: int, cluster: str | None, options: dict) -> None:
    plan = make_plan(world_size, cluster, **options)
    simulation = simulate_plan(plan)
    assert simulation.step_seconds == pytest.approx(plan.predicted_step_seconds, rel=0.01)
    for stage, simulated in zip(plan.stages, simulation.stages, strict=True):
        assert simulated.peak_bytes == stage.predicted.peak_bytes
        assert simulated.idle_share == pytest.approx(stage.predicted.idle_share, abs=0.01)


def test_what_is_simulated_with_other_micro_batches_is_what_the_planner_predicts_for_them() -> None:
    plan = make_plan(4, partition_num=4, pipeline_num=6)
    again = simulate_plan(make_plan(4, partition_num=4, max_pipeline=12), num_micro_batches=6)
    same_cut = [stage.blocks for stage in plan.stages]
    other = simulate_plan(plan)
    assert other.num_micro_batches == again.num_micro_batches == 6 and len(same_cut) == 4
    # The cut may be another one, for other micro-batches: never a faster one than the best for these.
    assert again.step_seconds >= 0.99 * other.step_seconds


def test_stages_are_named_by_modules() -> None:
    plan = make_plan(4, partition_num=4)
    root = module_tree(plan)
    names = [stage_modules(root, stage.index) for stage in plan.stages]
    assert any(name.startswith("transformer.wte") for name in names[0])
    assert any(name.startswith("lm_head") for name in names[-1])
    assert all(names)
