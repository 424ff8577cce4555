"""What AutoDist's items do to a plan: dry runs with the items of its document, on clusters of the sizes that it names."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.autodist import AutoDistConfig
from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import InfeasiblePlanError, JobSizeError, PlanError, UnknownModuleError
from rannc_backend.ir.plan import Plan
from rannc_backend.log.step_timer import StepTimer
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_fits_graph import check_options
from rannc_backend.planner.plan_model import analyze_model, plan_analysis
from rannc_backend.settings.sources import resolve_config

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(torch.relu(self.attention(x)))


class Tower(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class Transformer(nn.Module):
    """Two towers, one after the other: five modules of AutoDist's example to cut at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Tower(), Tower()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tower in self.layer:
            x = tower(x)
        return x.square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer(x)


# The Python blocks of AutoDist's document: its items, and the devices and rows that it names or leaves open.
EXAMPLES: dict[str, tuple[dict[str, Any], int, int]] = {
    "basic": (
        {"task_name": "my_experiment", "memory_constraint": 32, "recompute_modules": "transformer.layer"},
        8,
        32,
    ),
    "task": ({"task_name": "bert_large_training"}, 8, 32),
    "memory": ({"memory_constraint": 80}, 8, 32),
    "recompute": ({"recompute_modules": "transformer.layer,attention"}, 8, 32),
    "recompute_all": ({"recompute_modules": "ROOT"}, 8, 32),
    "recompute_several": ({"recompute_modules": "encoder.layer,decoder.layer"}, 8, 32),
    "pivots": ({"pipeline_pivots": "encoder,decoder"}, 8, 32),
    "high_memory": (
        {
            "task_name": "large_model_training",
            "memory_constraint": 80,
            "recompute_modules": "transformer.layer",
            "zero_stage": 1,
            "zero_ngroups": 4,
            "opt_resident_coef": 6,
            "opt_transient_coef": 2,
            "topk": 50,
        },
        8,
        32,
    ),
    "pipeline": (
        {
            "task_name": "pipeline_training",
            "pipeline_pivots": "encoder,decoder",
            "pipeline_nstages": 4,
            "pipeline_scheduler": "1f1b",
            "max_pipeline_bubble_ratio": 0.1,
            "mesh_row": 2,
            "mesh_col": 4,
            "micro_batch_size": 2,
            "update_freq": 4,
        },
        8,
        8,
    ),
    "efficient": (
        {
            "task_name": "efficient_training",
            "is_train": True,
            "consider_mem": True,
            "memory_constraint": 24,
            "recompute_modules": "attention,mlp",
            "solver": "ilp",
            "topk": 10,
        },
        8,
        32,
    ),
}


@functools.lru_cache
def _analysis() -> GraphAnalysis:
    with torch.device("meta"):
        return analyze_model(Model(), (torch.zeros(2, WIDTH),), {}, cluster=load_cluster("a100-80gb", 8))


def _plan(
    num_devices: int = 2, batch_rows: int = 32, *, own: dict[str, Any] | None = None, timer: StepTimer | None = None,
    cluster: str = "generic-cpu", **items: Any,
) -> Plan:  # fmt: skip
    options = AutoDistConfig(**items).options()
    config = resolve_config({"stage_compiler": "eager", "costs": "rules", **(own or {}), **options}, {})
    question = PlanningQuestion(
        config=config,
        cluster=replace(load_cluster(cluster, num_devices), num_devices=num_devices),
        batch_rows=batch_rows,
        **({} if timer is None else {"step_timer": timer}),
    )
    return plan_analysis(_analysis(), question)


@pytest.mark.parametrize(
    "name", ["basic", "task", "memory", "recompute", "recompute_all", "pivots", "high_memory", "efficient"]
)
def test_examples_of_the_document_are_planned_at_their_size(name: str) -> None:
    items, num_devices, rows = EXAMPLES[name]
    plan = _plan(num_devices, rows, cluster="a100-80gb", **items)
    assert plan.world_size == num_devices and plan.plan_name == items.get("task_name", "")
    if "memory_constraint" in items:
        assert plan.memory_limit_bytes == pytest.approx(0.9 * items["memory_constraint"] * 2**30)
    told = items.get("recompute_modules", "")
    assert plan.told_recompute == told
    if name == "high_memory":
        assert (plan.zero_stage, plan.zero_ngroups) == (1, 4)


def test_the_example_of_a_pipeline_asks_for_more_than_its_bubbles_allow() -> None:
    items, num_devices, rows = EXAMPLES["pipeline"]
    # 4 stages of 4 micro-batches idle for 3 of 7 units of time, and it allows a tenth: no plan does that.
    with pytest.raises(InfeasiblePlanError, match="max_pipeline_bubble_ratio"):
        _plan(num_devices, rows, **items)
    plan = _plan(num_devices, rows, **{**items, "max_pipeline_bubble_ratio": 0.5})
    assert (plan.num_stages, plan.num_micro_batches, plan.schedule) == (4, 4, "1f1b")
    assert plan.cluster.devices_per_node == 4 and plan.world_size == 8
    starts = [stage.modules[0].removesuffix(".0.attention") for stage in plan.stages]
    assert starts == [
        f"transformer.layer.{tower}.{half}" for tower in (0, 1) for half in ("encoder", "decoder")
    ]


def test_an_example_of_modules_that_the_model_lacks_names_those_that_it_has() -> None:
    items, num_devices, rows = EXAMPLES["recompute_several"]
    with pytest.raises(UnknownModuleError, match="did you mean"):
        _plan(num_devices, rows, **items)


def test_the_limit_of_memory_binds() -> None:
    free = _plan(pipeline_nstages=2)
    little = 1.2 * free.peak_bytes / 2**30
    assert _plan(pipeline_nstages=2, memory_constraint=little).memory_limit_bytes == pytest.approx(
        0.9 * little * 2**30
    )
    with pytest.raises(InfeasiblePlanError):
        _plan(memory_constraint=little / 10)
    assert _plan(memory_constraint=little / 10, consider_mem=False).num_stages >= 1
    assert _plan(memory_constraint=little, consider_mem=True, pipeline_nstages=2) == _plan(
        memory_constraint=little, pipeline_nstages=2
    )


def test_optimizer_state_is_in_the_account() -> None:
    for factor in (0, 3):
        for stage in _plan(opt_resident_coef=factor, pipeline_nstages=2).stages:
            assert stage.predicted.optimizer_bytes == factor * stage.predicted.parameter_bytes


def test_items_of_memory_change_the_account() -> None:
    plain = [stage.predicted for stage in _plan(pipeline_nstages=2).stages]

    def changed(**items: Any) -> list[Any]:
        return [stage.predicted for stage in _plan(pipeline_nstages=2, **items).stages]

    assert all(a.activation_bytes < b.activation_bytes for a, b in zip(plain, changed(opt_transient_coef=90)))
    assert all(a.workspace_bytes < b.workspace_bytes for a, b in zip(plain, changed(transient_mem_coef=90)))
    assert all(b.parameter_bytes % 999 == 0 for b in changed(memory_granularity=999))
    assert all(
        a.parameter_bytes > b.parameter_bytes
        for a, b in zip(plain, changed(ignore_small_tensor_threshold=65))
    )


def test_modules_are_recomputed() -> None:
    kept, again = _plan(pipeline_nstages=2), _plan(pipeline_nstages=2, recompute_modules="mlp")
    assert again.told_recompute == "mlp" and {stage.recompute for stage in again.stages} == {0.001}
    assert {stage.recompute for stage in kept.stages} == {1.0}


def test_zero_is_in_the_plan() -> None:
    replicas = {"replica_num": 8}
    plain, divided, groups = (
        _plan(8, own=replicas, zero_stage=stage, zero_ngroups=number)
        for stage, number in ((0, 1), (1, 1), (1, 4))
    )
    sizes = [plan.stages[0].predicted.optimizer_bytes for plan in (plain, divided, groups)]
    assert sizes[0] > sizes[2] > sizes[1]


def test_the_number_of_stages() -> None:
    assert [_plan(4, pipeline_nstages=number).num_stages for number in (1, 2, 4)] == [1, 2, 4]
    with pytest.raises(InfeasiblePlanError, match="stage_pivots"):
        _plan(4, pipeline_nstages=4, pipeline_pivots="decoder")


def test_the_schedule() -> None:
    free = _plan(pipeline_nstages=2, update_freq=4)
    assert (
        _plan(pipeline_nstages=2, update_freq=4, pipeline_scheduler="1f1b").schedule
        == "1f1b"
        != free.schedule
    )


def test_limits_of_pipelines_bind() -> None:
    with pytest.raises(InfeasiblePlanError, match="max_pipeline_bubble_ratio"):
        _plan(pipeline_nstages=2, update_freq=2, max_pipeline_bubble_ratio=0.1)
    with pytest.raises(InfeasiblePlanError, match="max_pipeline_unbalance_ratio"):
        _plan(
            own={"stage_starts": "transformer.layer.0.encoder.0.mlp"},
            pipeline_nstages=2,
            max_pipeline_unbalance_ratio=0.9,
        )


def test_the_job_is_held_to_its_size() -> None:
    plan = _plan(8, 8, mesh_row=2, mesh_col=4, micro_batch_size=2, update_freq=4)
    assert (plan.cluster.devices_per_node, plan.num_micro_batches) == (4, 4)
    for wrong in (
        {"mesh_row": 2},
        {"mesh_col": 4},
        {"world_size": 4},
        {"micro_batch_size": 3},
        {"micro_batch_size": 1, "update_freq": 4},
    ):
        with pytest.raises(JobSizeError):
            _plan(8, 8, **wrong)


def test_plans_are_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(_plan(pipeline_nstages=2).to_json())
    loaded = AutoDistConfig(load_plan_path=str(file), pipeline_nstages=2)
    config = resolve_config(loaded, {})
    assert config.load_deployment and config.deployment_file == str(file)
    plan = Plan.from_json(file.read_text())
    check_options(plan, config, [plan.schedule])
    with pytest.raises(PlanError, match="partition_num asks for 3"):
        check_options(
            plan,
            resolve_config(AutoDistConfig(load_plan_path=str(file), pipeline_nstages=3), {}),
            [plan.schedule],
        )


@pytest.mark.parametrize("costs", ["rules", "analytic"])
def test_plans_for_inference_have_no_backward(costs: str) -> None:
    train, infer = (_plan(own={"costs": costs}, is_train=each, pipeline_nstages=2) for each in (True, False))
    for one, other in zip(train.stages, infer.stages, strict=True):
        cost = other.predicted
        assert (cost.gradient_bytes, cost.optimizer_bytes, cost.backward_seconds, cost.allreduce_seconds) == (
            0,
            0,
            0,
            0,
        )
        assert cost.parameter_bytes > 0 and cost.peak_bytes < one.predicted.peak_bytes
    assert 0 < infer.predicted_step_seconds < train.predicted_step_seconds
    # What does not fit for training does for inference.
    limit = infer.peak_bytes / 2**30 * 1.2
    with pytest.raises(InfeasiblePlanError):
        _plan(own={"costs": costs}, memory_constraint=limit, pipeline_nstages=2, recompute_modules="ROOT")
    assert _plan(own={"costs": costs}, memory_constraint=limit, is_train=False).num_stages >= 1


def test_planning_tells_its_steps() -> None:
    assert resolve_config(AutoDistConfig(verbose=True), {}).verbose
    told: list[str] = []
    _plan(verbose=True, timer=StepTimer(log=lambda step: told.append(str(step))))
    assert any(line.startswith("search") for line in told)
