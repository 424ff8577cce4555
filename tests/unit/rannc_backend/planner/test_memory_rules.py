"""The memory account under the options that change how it is made: each part as documented, and the limit binds on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.plan import Plan, StageCost
from rannc_backend.planner.blocks_file import PlannableModel
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_blocks import PlanningQuestion, plan_prepared
from rannc_backend.planner.plan_model import analyze_model, prepare
from rannc_backend.planner.search.over_intervals import LargestOperators
from rannc_backend.settings.sources import resolve_config

CLUSTER = load_cluster("generic-cpu", 2)
PARTS = ("parameter", "gradient", "optimizer", "activation", "buffer", "workspace")
WIDTH = 64


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)),
            nn.Linear(WIDTH, 4 * WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _question(**options: Any) -> PlanningQuestion:
    config = resolve_config({"stage_compiler": "eager", "partition_num": 2, "pipeline_num": 4, **options}, {})
    return PlanningQuestion(config=config, cluster=replace(CLUSTER, num_devices=2), batch_rows=32)


def _prepared(**options: Any) -> PlannableModel:
    question = _question(**options)
    with torch.device("meta"):
        analysis = analyze_model(Layers(), (torch.zeros(2, WIDTH),), {}, cluster=question.cluster)
    return prepare(analysis, question)


@pytest.fixture(scope="module", params=["rules", "analytic"])
def costs(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prepared(costs: str) -> PlannableModel:
    return _prepared(costs=costs)


def _plan(model: PlannableModel, costs: str, **options: Any) -> Plan:
    return plan_prepared(model, _question(costs=costs, **options))


def _parts(cost: StageCost) -> list[int]:
    return [getattr(cost, f"{part}_bytes") for part in PARTS]


def test_what_an_optimizer_needs_takes_the_place_of_activations(prepared: PlannableModel, costs: str) -> None:
    plain, more = (_plan(prepared, costs, opt_transient_factor=factor) for factor in (0.0, 50.0))
    for before, after in zip(plain.stages, more.stages, strict=True):
        assert after.predicted.activation_bytes == 50 * after.predicted.parameter_bytes
        assert after.predicted.activation_bytes > before.predicted.activation_bytes
        assert _parts(after.predicted)[:3] == _parts(before.predicted)[:3]
    little = _plan(prepared, costs, opt_transient_factor=1e-3)
    assert [_parts(stage.predicted) for stage in little.stages] == [
        _parts(stage.predicted) for stage in plain.stages
    ]
    parts = _plan(prepared, costs, opt_transient_factor=50.0, num_apply_group=2)
    assert parts.stages[0].predicted.activation_bytes == 25 * parts.stages[0].predicted.parameter_bytes


def test_the_limit_binds_on_what_an_optimizer_needs(prepared: PlannableModel, costs: str) -> None:
    limit = {"mem_limit_gb": 1.0001 * _plan(prepared, costs).peak_bytes / 2**30, "mem_margin": 0.0}
    assert _plan(prepared, costs, **limit).num_stages == 2
    with pytest.raises(InfeasiblePlanError) as caught:
        _plan(prepared, costs, opt_transient_factor=50.0, **limit)
    assert caught.value.smallest_bytes is not None
    enough = {"mem_limit_gb": 1.01 * caught.value.smallest_bytes / 2**30, "mem_margin": 0.0}
    plan = _plan(prepared, costs, opt_transient_factor=50.0, **enough)
    assert plan.peak_bytes <= plan.memory_limit_bytes


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v", "v_half"])
def test_ranks_with_several_stages_have_room_for_all_updates(
    prepared: PlannableModel, costs: str, schedule: str
) -> None:
    plan = _plan(prepared, costs, opt_transient_factor=50.0, partition_num=4, schedule=schedule)
    assert plan.schedule == schedule and len(plan.lanes) == 2
    state = [stage.predicted.parameter_bytes for stage in plan.stages]
    assert all(plan.lane_peak_bytes(lane[0]) > 50 * sum(state[x] for x in lane) for lane in plan.lanes)


def test_workspace_by_the_two_largest_operators(prepared: PlannableModel, costs: str) -> None:
    once, twice = (_plan(prepared, costs, transient_memory_factor=factor) for factor in (1.0, 2.0))
    for one, two in zip(once.stages, twice.stages, strict=True):
        blocks = [prepared.graph.blocks[index] for index in one.blocks]
        rows = one.at_rows[-1].rows
        sizes = sorted(
            float(size.subs({s: rows for s in size.free_symbols}))
            for b in blocks
            for size in b.workspace_bytes
        )
        expected = sizes[-1] + sizes[-2]
        assert two.predicted.workspace_bytes - one.predicted.workspace_bytes == pytest.approx(expected, abs=2)
        assert _parts(one.predicted)[:5] == _parts(two.predicted)[:5]


def test_two_largest_of_all_intervals_are_those_of_each() -> None:
    random = np.random.default_rng(3)
    first = random.integers(1, 100, (7, 2)).astype(float)
    blocks = LargestOperators(np.stack([first, np.minimum(first, random.integers(1, 100, (7, 2)))]))
    found = blocks.over(np.array([1, 0]), 7)
    for begin in range(7):
        for length in range(7):
            inside = LargestOperators(blocks.by_block[:, begin : begin + length + 1])
            assert found[begin, length].tolist() == inside.of_all()[[1, 0]].tolist()


def test_parts_are_rounded_up_to_the_granularity(prepared: PlannableModel, costs: str) -> None:
    plain, rounded = (
        _plan(prepared, costs, schedule="1f1b", memory_granularity_bytes=size) for size in (1, 1000)
    )
    for before, after in zip(plain.stages, rounded.stages, strict=True):
        pairs = list(zip(_parts(before.predicted), _parts(after.predicted), strict=True))
        assert all(size % 1000 == 0 for _, size in pairs)
        # Activations are so many of four micro-batches.
        assert all(
            0 <= size - exact < 1000 * (5 if place == 3 else 1) for place, (exact, size) in enumerate(pairs)
        )
        assert any(size != exact for exact, size in pairs)


def test_the_limit_binds_on_rounded_parts(prepared: PlannableModel, costs: str) -> None:
    limit = {"mem_limit_gb": 1.001 * _plan(prepared, costs).peak_bytes / 2**30, "mem_margin": 0.0}
    with pytest.raises(InfeasiblePlanError):
        _plan(prepared, costs, memory_granularity_bytes=2**20, **limit)


def test_small_tensors_are_left_out(prepared: PlannableModel, costs: str) -> None:
    plain = _plan(prepared, costs)
    fewer = _plan(
        _prepared(costs=costs, small_tensor_elements=WIDTH + 1), costs, small_tensor_elements=WIDTH + 1
    )
    same = _plan(_prepared(costs=costs, small_tensor_elements=WIDTH), costs, small_tensor_elements=WIDTH)
    biases, total = 4 * 4 * WIDTH, sum(stage.predicted.parameter_bytes for stage in plain.stages)
    assert sum(stage.predicted.parameter_bytes for stage in same.stages) == total
    assert sum(stage.predicted.parameter_bytes for stage in fewer.stages) == total - biases
    kept = [sum(stage.predicted.activation_bytes for stage in plan.stages) for plan in (plain, same, fewer)]
    assert kept[0] == kept[1] > kept[2]
