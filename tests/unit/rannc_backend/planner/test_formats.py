"""Plans under boundary_dtype, gradient_dtype, max_buckets and num_communicators: smaller messages and sums are priced,
and what they save is said.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_formats import Formats
from rannc_backend.planner.cost.transfer import communicator_memory
from rannc_backend.report.tables import shape_text
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.planning_graphs import Chain, SplitModel, plan_stages, split_model

ROWS = 16


def _model() -> SplitModel:
    return split_model(Chain(num_layers=4, width=32), {"x": torch.randn(4, 32)})


def _plan(replicas: str, **options: Any) -> Plan:
    model, world = _model(), sum(map(int, replicas.split(",")))
    config = Config(stage_replicas=replicas, pipeline_num=4, schedule="1f1b", **options)
    return plan_stages(
        model.split,
        model.inputs,
        model.needs_grad,
        config,
        world_size=world,
        batch_rows=ROWS,
        fingerprint="f",
    )


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("bf16", 0.5, 0.5), ("fp16", 0.5, 0.5), ("fp8", (1 + 4 / 128) / 4, 0.5), ("same", 1.0, 1.0)],
)
def test_messages_between_stages_have_fewer_bytes(name: str, forward: float, backward: float) -> None:
    plain, plan = _plan("1,1"), _plan("1,1", boundary_dtype=name)
    before, after = plain.stages[1], plan.stages[1]
    assert before.received_bytes_per_row > 0
    assert after.received_bytes_per_row == pytest.approx(before.received_bytes_per_row * forward, rel=1e-4)
    assert after.gradient_bytes_per_row == pytest.approx(before.gradient_bytes_per_row * backward, rel=1e-4)
    assert (after.predicted.transfer_seconds < before.predicted.transfer_seconds) == (name != "same")
    saved = ROWS * (
        before.received_bytes_per_row * (1 - forward) + before.gradient_bytes_per_row * (1 - backward)
    )
    assert plan.formats.saved_message_bytes == pytest.approx(saved, abs=1)
    assert plan.formats.saved_gradient_bytes == 0 and plan.formats.boundary_dtype == name
    longer = plain.predicted_step_seconds - plan.predicted_step_seconds
    assert plan.formats.saved_seconds == pytest.approx(longer, rel=1e-3, abs=1e-12)
    assert ("not exact" in shape_text(plan)) == (name != "same")
    # A value is in memory as it is, too.
    assert after.predicted.activation_bytes == before.predicted.activation_bytes


def test_sums_of_gradients_have_fewer_bytes() -> None:
    plain, plan = _plan("2"), _plan("2", gradient_dtype="bf16")
    before, after = plain.stages[0].predicted, plan.stages[0].predicted
    assert before.gradient_bytes == after.gradient_bytes
    assert after.allreduce_seconds < before.allreduce_seconds
    # Two replicas send half of each gradient less; each has the rounded buckets beside its own.
    assert plan.formats.saved_gradient_bytes == before.gradient_bytes
    assert after.buffer_bytes - before.buffer_bytes == before.gradient_bytes // 2
    assert "sums of gradients as bf16" in shape_text(plan)
    alone = _plan("1,1", gradient_dtype="bf16")
    assert alone.formats.saved_gradient_bytes == 0, "nobody sums"


def test_what_plans_say_is_read_again_and_old_plans_say_nothing() -> None:
    plan = _plan("2", gradient_dtype="fp16", gradient_scale=8.0)
    assert Plan.from_json(plan.to_json()) == plan and not plan.formats.are_exact
    text = _plan("2").to_json()
    assert Formats() == Plan.from_json(text).formats


def test_buckets_and_communicators_are_counted() -> None:
    assert _plan("2", max_buckets=3).stages[0].num_buckets == 3
    assert (
        _plan("2", bucket_mb=0.005).stages[0].num_buckets
        == _plan("2", bucket_mb=0.005, gradient_dtype="bf16").stages[0].num_buckets
    )


def test_communicators_take_memory() -> None:
    cluster: Any = SimpleNamespace(device=SimpleNamespace(communicator_bytes=100), num_devices=4)
    places = (np.array(0), np.array(1), np.array(2))
    one, three = (float(communicator_memory(cluster, 2, *places, number)) for number in (1, 3))
    assert three - one == 200
    # Replicas that divide updates in several groups have one more; all of them together, or each alone, none.
    replicas, divisors = np.array([4, 4, 4, 1]), np.array([1, 2, 4, 1])
    counted = communicator_memory(cluster, 2, *places[:2], replicas, 1, divisors)
    assert (counted - counted[0]).tolist()[:3] == [0, 100, 0]
