"""Plans under option offload: what a device holds, what the host does, what the copies take, and how it is said."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cluster.cluster import HOST_BYTES_PER_SECOND, Cluster
from rannc_backend.planner.cluster.cluster_file import load_cluster, shipped_clusters
from rannc_backend.report.comparison import compare
from rannc_backend.report.page import plan_page
from rannc_backend.report.tables import shape_text
from rannc_backend.report.words import offload_text, seconds_text, size_text
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, gpt2, plan_stages, split_model

FIXED = {"rows": 64, "recompute": "1", "pipeline_num": 4, "stage_replicas": "1,1", "schedule": "1f1b"}


@functools.cache
def model() -> SplitModel:
    return split_model(*gpt2(num_layers=2))


def make_plan(world_size: int, rows: int = 64, cluster: Cluster | None = None, **options: object) -> Plan:
    item = model()
    return plan_stages(
        item.split, item.inputs, item.needs_grad, Config(**options), world_size=world_size, batch_rows=rows,
        fingerprint="f" * 64, cluster=cluster or local_cpu(world_size, memory_bytes=8 * BYTES_PER_GB), model_name="gpt2",
    )  # fmt: skip


@functools.cache
def both(**options: object) -> tuple[Plan, Plan]:
    """Of the same stages, without and with offload."""
    plain, offloaded = (make_plan(2, **FIXED, **options, offload=name) for name in ("none", "parameters"))
    assert [stage.blocks for stage in plain.stages] == [stage.blocks for stage in offloaded.stages]
    return plain, offloaded


def test_optimizer_state_leaves_the_device_and_copies_and_sums_stay_while_a_step_runs() -> None:
    plain, offloaded = both()
    assert (plain.offload, offloaded.offload) == ("none", "parameters")
    for before, after in zip((x.predicted for x in plain.stages), (x.predicted for x in offloaded.stages)):
        assert before.optimizer_bytes == 2 * before.parameter_bytes > 0 == after.optimizer_bytes
        assert (
            after.parameter_bytes == before.parameter_bytes and after.gradient_bytes == before.gradient_bytes
        )
        state = before.parameter_bytes + before.gradient_bytes + before.optimizer_bytes
        assert (before.host_bytes, after.host_bytes) == (0, state)
        assert before.peak_bytes - after.peak_bytes >= before.optimizer_bytes
        moved = after.parameter_bytes + after.gradient_bytes
        assert after.offload_seconds == pytest.approx(moved / plain.cluster.host_bytes_per_second, rel=1e-4)
    longest = max(stage.predicted.offload_seconds for stage in offloaded.stages)
    assert offloaded.predicted_step_seconds == pytest.approx(plain.predicted_step_seconds + longest, rel=1e-4)
    assert offloaded.offload_seconds == longest


def test_state_that_is_divided_is_divided_on_the_host() -> None:
    options = {"rows": 64, "recompute": "1", "pipeline_num": 1, "replica_num": 2, "partition_num": 1}
    whole, divided = (make_plan(2, **options, offload="parameters", zero_stage=level) for level in (0, 1))
    costs = [plan.stages[0].predicted for plan in (whole, divided)]
    state = costs[0].host_bytes - costs[0].parameter_bytes - costs[0].gradient_bytes
    less = costs[1].host_bytes - costs[1].parameter_bytes - costs[1].gradient_bytes
    assert state / 2 <= less < 0.7 * state


def test_it_is_said_what_offload_frees_and_costs() -> None:
    plain, offloaded = both()
    freed = max(stage.predicted.optimizer_bytes for stage in plain.stages)
    text = offload_text(offloaded)
    assert text == (
        f"frees {size_text(freed)} on a device, and copies take {seconds_text(offloaded.offload_seconds)} "
        "of a step"
    )
    assert text in shape_text(offloaded) and "offload" not in shape_text(plain)
    assert text in plan_page(offloaded) and text not in plan_page(plain)
    assert offload_text(plain) == "none" and ", offload, step" in offloaded.summary()
    assert any("offload" in str(change) for change in compare(plain, offloaded).settings)


def test_offload_that_would_do_is_named_and_does() -> None:
    make = functools.partial(make_plan, 1, recompute="1", pipeline_num=8)
    need = make(offload="parameters").stages[0].predicted.peak_bytes / BYTES_PER_GB
    limit = need / 0.9 * 1.0001
    with pytest.raises(InfeasiblePlanError, match="offload=parameters") as caught:
        make(mem_limit_gb=limit)
    assert "offload=parameters" in caught.value.options_that_would_do
    assert make(mem_limit_gb=limit, offload="parameters").offload == "parameters"
    with pytest.raises(InfeasiblePlanError) as caught:
        make(mem_limit_gb=0.1 * need)
    assert "offload=parameters" not in caught.value.options_that_would_do


def test_what_offload_costs_is_said_where_there_is_room_without_it() -> None:
    options = {"recompute": "1", "pipeline_num": 4, "partition_num": 1}
    plain, offloaded = (make_plan(1, **options, offload=name) for name in ("none", "parameters"))
    cost = 1 - plain.predicted_step_seconds / offloaded.predicted_step_seconds
    assert cost > 0
    slow = local_cpu(1, memory_bytes=8 * BYTES_PER_GB)
    slow = replace(slow, device=replace(slow.device, host_bytes_per_second=1e7))
    costly = make_plan(1, cluster=slow, **options, offload="parameters")
    changes = {item.change: item.predicted_step_seconds for item in costly.what_if}
    assert changes["without offload=parameters"] == pytest.approx(plain.predicted_step_seconds)
    assert costly.binding.startswith("option offload=parameters: leaving it out would shorten the step by")


def test_every_shipped_cluster_says_how_fast_its_hosts_are() -> None:
    rates = {name: load_cluster(name, 8).device.host_bytes_per_second for name in shipped_clusters()}
    assert rates["h100-80gb"] > rates["a100-80gb"] > rates["v100-32gb"] > rates["generic-cpu"]
    assert rates["v100-32gb"] == HOST_BYTES_PER_SECOND


def test_parameters_go_to_the_host_where_nothing_fits_without() -> None:
    """`offload="auto"`: a plan that fits is the one without offload; where none fits, that of `offload="parameters"`."""
    make = functools.partial(make_plan, 1, recompute="1", pipeline_num=8)
    told = make(offload="parameters")
    roomy, auto = (make(offload=name) for name in ("none", "auto"))
    assert auto == roomy and auto.offload == "none"
    limit = told.stages[0].predicted.peak_bytes / BYTES_PER_GB / 0.9 * 1.0001
    found = make(offload="auto", mem_limit_gb=limit)
    assert (
        found.offload == "parameters"
        and found.stages == make(offload="parameters", mem_limit_gb=limit).stages
    )
    (reason,) = (each.reason for each in found.alternatives if "without offload" in each.reason)
    assert reason.startswith("without offload: nothing fits into ") and reason in plan_page(found)
    # Not an option that binds: it leaves the plan free.
    assert not any("offload" in item.change for item in found.what_if)
    with pytest.raises(InfeasiblePlanError):
        make(offload="auto", mem_limit_gb=limit / 10)
