"""What the options say of the job's size binds, with the sum in the error; a name and memory without a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.errors import InfeasiblePlanError, JobSizeError, OptionValueError, PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cluster.asked_job import of_whole_batch
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_fits_graph import check_options
from rannc_backend.planner.plan_model import plan_model
from rannc_backend.report.comparison import compare
from rannc_backend.report.summary import plan_summary
from rannc_backend.report.tables import memory_text, shape_text
from rannc_backend.report.words import name_text
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve_config

CLUSTER = load_cluster("a100-80gb", 8)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _config(**options: Any) -> Config:
    return resolve_config({"stage_compiler": "eager", "costs": "rules", **options}, {})


def _plan(num_devices: int = 8, batch_rows: int = 16, **options: Any) -> Plan:
    question = PlanningQuestion(
        config=_config(**options), cluster=replace(CLUSTER, num_devices=num_devices), batch_rows=batch_rows
    )
    with torch.device("meta"):
        return plan_model(Layers(), (torch.zeros(2, 256),), {}, question)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "2x2"}, "'mesh' asks for 2 x 2 = 4 ranks, and there are 8"),
        ({"num_ranks": 16}, "'num_ranks' asks for 16 ranks, and there are 8"),
        ({"mesh": "1x2", "num_ranks": 16}, "'num_ranks' asks for 16 ranks"),
        ({"micro_batch_rows": 3}, "16 rows of all ranks together is 5 x 3 + 1"),
        (
            {"micro_batch_rows": 2, "pipeline_num": 4},
            "2 x 4 = 8 rows of all ranks together, and the batch has 16",
        ),
    ],
)
def test_a_job_of_another_size_is_refused_with_the_sum(options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobSizeError) as caught:
        _plan(**options)
    assert words in str(caught.value) and "What to change" in str(caught.value)


def test_a_mesh_that_does_not_divide_the_ranks_is_an_error_of_the_options() -> None:
    with pytest.raises(OptionValueError, match="a multiple of the devices of mesh"):
        _config(mesh="2x4", num_ranks=12)


def test_the_mesh_says_which_devices_share_a_node() -> None:
    assert _plan().cluster.devices_per_node == CLUSTER.devices_per_node == 8
    near, far = _plan(mesh="1x8", partition_num=8), _plan(mesh="8x1", partition_num=8)
    assert (near.cluster.devices_per_node, far.cluster.devices_per_node) == (8, 1)
    # Messages between nodes take longer.
    assert far.stages[1].predicted.transfer_seconds > near.stages[1].predicted.transfer_seconds
    copies = _plan(mesh="1x2", num_ranks=8)
    assert copies.cluster.devices_per_node == 2 and copies.world_size == 8


def test_rows_of_a_micro_batch_give_their_number() -> None:
    plan = _plan(micro_batch_rows=4, partition_num=4)
    assert (plan.num_micro_batches, plan.batch_rows) == (4, 16)
    assert _plan(micro_batch_rows=2, pipeline_num=8, partition_num=2).num_micro_batches == 8


def test_a_loaded_plan_is_held_to_the_size_of_the_job() -> None:
    plan = _plan(mesh="2x4", micro_batch_rows=4)
    check_options(plan, _config(mesh="2x4", micro_batch_rows=4, num_ranks=8), [plan.schedule])
    for other in ({"mesh": "4x2"}, {"mesh": "1x4"}, {"num_ranks": 4}, {"micro_batch_rows": 8}):
        with pytest.raises(PlanError, match=next(iter(other))):
            check_options(plan, _config(**other), [plan.schedule])


def test_a_plan_has_the_name_of_its_job() -> None:
    plain, named = _plan(), _plan(plan_name="bert large")
    assert named.plan_name == "bert large" and plain.plan_name == ""
    assert plain.summary().startswith("plan of Layers for 8")
    assert named.summary().startswith("plan of bert large, Layers for 8")
    assert (name_text(plain), name_text(named)) == ("Layers", "bert large, Layers")
    assert plan_summary(named)["plan_name"] == "bert large"
    assert [(change.what, change.b) for change in compare(plain, named).settings] == [("name", "bert large")]


def test_memory_can_be_left_out_of_account() -> None:
    little = {"mem_limit_gb": 1e-5}
    with pytest.raises(InfeasiblePlanError):
        _plan(**little)
    plan = _plan(**little, ignore_memory=True)
    assert plan.peak_bytes > 1e-5 * 2**30
    assert "any memory" in memory_text(plan) and shape_text(plan) == shape_text(_plan())


@pytest.mark.parametrize(
    ("options", "fixed", "told"),
    [
        ({}, None, ""),
        ({"pipeline_num": 1, "replica_num": 1}, (1, 1), ""),
        ({"pipeline_num": 2}, None, "pipeline_num"),
        ({"replica_num": 2, "min_pipeline": 2}, None, "replica_num, min_pipeline"),
        ({"stage_replicas": "2,1"}, (2, 1), "stage_replicas"),
    ],
)
def test_what_a_batch_that_is_one_micro_batch_cannot_have_is_told(
    options: dict[str, Any], fixed: tuple[int, ...] | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = of_whole_batch(_config(**options), fixed)
    assert (found.pipeline_num, found.replica_num, found.stage_replicas) == (1, 1, "")
    assert found.partition_num == len(fixed or ())
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        f"{told} cannot be had"
    ] * bool(told)
