"""What binds a plan is what would gain most, and each gain is that of a plan made for the changed devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.what_binds import (
    FASTER_LINKS,
    MORE_DEVICES,
    MORE_MEMORY,
    ON_HOST,
    ONE_MORE_DEVICE,
    WITHOUT,
    gains_text,
)
from rannc_backend.report.words import percent_text
from tests.choice import mostly
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.test_planner import make_plan


def changed(cluster: Cluster, change: str) -> Cluster:
    def twice(name: str) -> dict[str, object]:
        link = getattr(cluster, name)
        return {name: replace(link, bytes_per_second=2 * link.bytes_per_second)}

    return {
        ONE_MORE_DEVICE: lambda: replace(
            cluster, num_devices=cluster.num_devices + 1, devices_per_node=cluster.num_devices + 1
        ),
        MORE_MEMORY: lambda: replace(
            cluster, device=replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes)
        ),
        FASTER_LINKS: lambda: replace(cluster, **twice("intra_node"), **twice("inter_node")),
        MORE_DEVICES: lambda: replace(cluster, num_devices=2 * cluster.num_devices),
    }[change]()


UNDIVIDED = f"{WITHOUT}zero_stage=0"


def steps(plan: Plan) -> dict[str, float | None]:
    return {item.change: item.predicted_step_seconds for item in plan.what_if}


@pytest.mark.parametrize(
    ("num_devices", "options"),
    mostly(
        [(2, {}), (2, {"partition_num": 2}), (3, {"replica_num": 1}), (1, {"recompute": "1"})],
        [(2, {"partition_num": 2}), (1, {"recompute": "1"})],
    ),
    ids=str,
)
def test_each_gain_is_that_of_a_plan_made_for_the_changed_devices(
    num_devices: int, options: dict[str, object]
) -> None:
    options = options | {"zero_stage": 0}
    roomy = make_plan("gpt2", num_devices, **options)
    most = max(stage.predicted.peak_bytes for stage in roomy.stages)
    # Memory that forces more micro-batches or recomputing, a slow link, a node that is full.
    cluster = local_cpu(num_devices, memory_bytes=int(0.8 * most / 0.9))
    slow = replace(cluster.intra_node, bytes_per_second=2e7)
    cluster = replace(cluster, devices_per_node=num_devices, intra_node=slow, inter_node=slow)
    plan = make_plan("gpt2", num_devices, cluster=cluster, **options)
    found = steps(plan)
    memory_binds = found[MORE_MEMORY] < 0.99 * plan.predicted_step_seconds
    divided = [UNDIVIDED] if memory_binds and num_devices > 1 and options.get("replica_num") != 1 else []
    changes = [ONE_MORE_DEVICE, MORE_MEMORY, FASTER_LINKS, MORE_DEVICES]
    on_host = [ON_HOST] * memory_binds
    assert list(found) in ([*changes, *on_host], [*changes, *divided, *on_host])
    for change, step in found.items():
        more = {UNDIVIDED: {"zero_stage": 1}, ON_HOST: {"offload": "parameters"}}.get(change, {})
        other = cluster if more else changed(cluster, change)
        again = make_plan("gpt2", other.num_devices, cluster=other, **(options | more))
        # With the number of stages given, the planner prefers even ones, so its plan may be slower: the one
        # there is stays good.
        assert step == pytest.approx(
            min(again.predicted_step_seconds, plan.predicted_step_seconds), rel=2e-3
        ), change


def test_memory_binds_where_it_forces_recomputing_and_the_options_leave_no_use_for_devices() -> None:
    asked = {"stage_replicas": "1,1", "pipeline_num": 8, "schedule": "fill_drain"}
    roomy = make_plan("gpt2", 2, rows=64, **asked)
    need = max(stage.predicted.peak_bytes for stage in roomy.stages) / BYTES_PER_GB
    tight = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.6 * need / 0.9, **asked)
    changes = [change for change in steps(tight) if not change.startswith(WITHOUT)]
    assert changes == [ONE_MORE_DEVICE, MORE_MEMORY, FASTER_LINKS, ON_HOST]
    offloaded = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.6 * need / 0.9, offload="parameters", **asked)
    assert steps(tight)[ON_HOST] == pytest.approx(
        min(offloaded.predicted_step_seconds, tight.predicted_step_seconds)
    )
    assert ON_HOST not in steps(offloaded) and ON_HOST not in steps(roomy)
    assert steps(tight)[ONE_MORE_DEVICE] == tight.predicted_step_seconds
    saved = 100 * (1 - roomy.predicted_step_seconds / tight.predicted_step_seconds)
    assert tight.binding.startswith(f"memory: twice the memory would shorten the step by {saved:.0f} %, ")
    assert "one more device by nothing" in tight.binding and "; slowest: compute of stage" in tight.binding
    assert "twice the memory by nothing" in roomy.binding


def test_divided_state_is_offered_where_memory_binds_replicas() -> None:
    """Two replicas whose optimizer state leaves no room for the activations of all micro-batches."""
    asked = {"replica_num": 2, "pipeline_num": 8, "schedule": "fill_drain", "opt_param_factor": 4.0}
    roomy = make_plan("gpt2", 2, rows=64, zero_stage=0, **asked)
    need = roomy.stages[0].predicted.peak_bytes / BYTES_PER_GB
    tight = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.95 * need / 0.9, zero_stage=0, **asked)
    assert tight.predicted_step_seconds > roomy.predicted_step_seconds
    divided = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.95 * need / 0.9, zero_stage=1, **asked)
    assert divided.zero_stage == 1 and divided.predicted_step_seconds < tight.predicted_step_seconds
    assert steps(tight)[UNDIVIDED] == pytest.approx(divided.predicted_step_seconds)
    assert UNDIVIDED not in steps(divided) and UNDIVIDED not in steps(roomy)
    state = tight.stages[0].predicted.optimizer_bytes
    assert state / 2 <= divided.stages[0].predicted.optimizer_bytes < 0.7 * state
    # Left to the planner, it is taken where it is faster, and there alone.
    free = make_plan("gpt2", 2, rows=64, mem_limit_gb=0.95 * need / 0.9, **asked)
    assert free.zero_stage == 1 and free.predicted_step_seconds == divided.predicted_step_seconds
    (lost,) = (item for item in free.alternatives if item.reason.startswith("without ZeRO"))
    assert lost.predicted_step_seconds == pytest.approx(tight.predicted_step_seconds)
    assert make_plan("gpt2", 2, rows=64, **asked).zero_stage == 0


def gains(device: float, memory: float, links: float, devices: float) -> dict[str, float]:
    return {ONE_MORE_DEVICE: device, MORE_MEMORY: memory, FASTER_LINKS: links, MORE_DEVICES: devices}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            gains(0.2, 0.009, 0.0, 0.4),
            "the number of devices: one more device would shorten the step by 20 %, twice the memory by 0.9 "
            "%, twice the link speed by nothing",
        ),
        (
            gains(0.02, 0.01, 0.125, 0.4),
            "links: twice the link speed would shorten the step by 12 %, one more device by 2.0 %, twice the "
            "memory by 1.0 %",
        ),
        (
            gains(0.0, 0.009, 0.002, 0.0),
            "none of devices, memory and links: twice the memory would shorten the step by 0.9 %, twice the "
            "link speed by 0.2 %, one more device by nothing",
        ),
        (
            gains(0.0, 0.009, 0.0, 0.43),
            "the number of devices: twice the devices would shorten the step by 43 %, twice the memory by "
            "0.9 %, one more device by nothing, twice the link speed by nothing",
        ),
    ],
    ids=["devices", "links", "none", "devices_by_the_dozen"],
)
def test_what_gains_most_binds_and_less_than_a_hundredth_binds_nothing(
    found: dict[str, float], text: str
) -> None:
    assert gains_text(found) == text


@pytest.mark.parametrize(
    ("kept", "name", "value"),
    [
        ({"partition_num": 4}, "max_pipeline", 2),
        ({"partition_num": 4}, "pipeline_num", 2),
        ({}, "min_pipeline", 32),
        ({}, "partition_num", 4),
        ({}, "stage_replicas", "1,3"),
        ({"partition_num": 4}, "recompute", "0.0"),
    ],
)
def test_an_option_that_binds_is_told_with_what_it_costs(
    kept: dict[str, object], name: str, value: object
) -> None:
    free = make_plan("gpt2", 4, rows=64, **kept)
    plan = make_plan("gpt2", 4, rows=64, **kept, **{name: value})
    change = f"{WITHOUT}{name}={value}"
    # Of large problems by a short search.
    assert steps(plan)[change] == pytest.approx(free.predicted_step_seconds, rel=0.01)
    saved = 1 - free.predicted_step_seconds / plan.predicted_step_seconds
    assert saved >= 0.01
    told = 1 - steps(plan)[change] / plan.predicted_step_seconds
    text = f"option {name}={value}: leaving it out would shorten the step by {percent_text(told)}"
    most = max(1 - step / plan.predicted_step_seconds for step in steps(plan).values())
    assert (text in plan.binding) == (told == most)


def test_options_that_bind_nothing_are_not_told() -> None:
    free = make_plan("gpt2", 4, rows=64)
    same = {"max_pipeline": free.num_micro_batches, "mem_limit_gb": 1e3, "recompute": "1.0"}
    plan = make_plan("gpt2", 4, rows=64, **same)
    assert not any(change.startswith(WITHOUT) for change in steps(plan))
    assert "option" not in plan.binding


def test_a_memory_limit_that_binds_is_told() -> None:
    asked = {"replica_num": 2, "pipeline_num": 8, "schedule": "fill_drain", "zero_stage": 0}
    free = make_plan("gpt2", 2, rows=64, **asked)
    need = free.stages[0].predicted.peak_bytes / BYTES_PER_GB
    limit = round(0.95 * need / 0.9, 6)
    plan = make_plan("gpt2", 2, rows=64, mem_limit_gb=limit, **asked)
    change = f"{WITHOUT}mem_limit_gb={limit:g}"
    assert steps(plan)[change] == pytest.approx(free.predicted_step_seconds, rel=1e-3)


def test_no_number_of_micro_batches_is_too_many_by_default() -> None:
    """RaNNC allowed 32."""
    plan = make_plan("gpt2", 4, rows=1024, partition_num=4, min_pipeline=33)
    assert plan.num_micro_batches > 32


def test_a_setting_that_is_lowered_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where other options are left out to see what they cost."""
    make_plan("chain", 2, rows=4, pipeline_num=8, recompute="1.0", replica_num=1)
    assert (
        sum(
            "are too many" in record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING"
        )
        == 1
    )
