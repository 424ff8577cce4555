"""Stages start at the modules of option stage_pivots and nowhere else, also in plans that are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import InfeasiblePlanError, PlanError, RanncError, StagePinError, UnknownModuleError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.blocks.told_recompute import with_pivots
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_fits_graph import check_plan, exact_schedules
from rannc_backend.planner.plan_model import analyze_model, plan_analysis
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve_config


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.fc(x)))


class Half(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Halves(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder, self.decoder = Half(width, 4), Half(width, 3)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(x))).square().mean()


LAYERS = [
    f"{half}.layer.{number}" for half, count in (("encoder", 4), ("decoder", 3)) for number in range(count)
]


def _config(**options: Any) -> Config:
    return resolve_config({"stage_compiler": "eager", "costs": "rules", **options}, {})


def _question(num_devices: int, **options: Any) -> PlanningQuestion:
    cluster = replace(load_cluster("a100-80gb", num_devices), num_devices=num_devices)
    return PlanningQuestion(config=_config(**options), cluster=cluster, batch_rows=32)


@pytest.fixture(scope="module")
def halves() -> GraphAnalysis:
    with torch.device("meta"):
        return analyze_model(Halves(), (torch.zeros(2, 256),), {}, cluster=load_cluster("a100-80gb", 4))


def _plan(analysis: GraphAnalysis, num_devices: int = 4, **options: Any) -> Plan:
    return plan_analysis(analysis, _question(num_devices, **options))


def _starts(plan: Plan) -> list[str]:
    return [stage.modules[0] for stage in plan.stages]


def _check(plan: Plan, analysis: GraphAnalysis, **options: Any) -> None:
    check_plan(
        plan,
        analysis.split,
        analysis.captured.inputs,
        config=with_pivots(_config(**options), analysis),
        fingerprint=plan.fingerprint,
        world_size=plan.world_size,
        device_memory_bytes=2**40,
        possible_schedules=exact_schedules(analysis.split, analysis.needs_grad),
    )


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"partition_num": 2, "stage_pivots": "head"}, ["encoder.layer.0.fc", "head"]),
        ({"partition_num": 2, "stage_pivots": "encoder,head"}, ["encoder.layer.0.fc", "head"]),
        (
            {"partition_num": 3, "stage_pivots": ["decoder", "head"]},
            ["encoder.layer.0.fc", "decoder.layer.0.fc", "head"],
        ),
        ({"stage_pivots": "encoder"}, ["encoder.layer.0.fc"]),
        ({"stage_pivots": "Half"}, ["encoder.layer.0.fc", "decoder.layer.0.fc"]),
    ],
)
def test_stages_start_at_pivots_alone(
    halves: GraphAnalysis, options: dict[str, Any], starts: list[str]
) -> None:
    assert _starts(_plan(halves, **options)) == starts


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "zb_h1", "interleaved", "list_scheduled"])
@pytest.mark.parametrize("name", ["layer", "Block"])
def test_an_end_of_a_name_or_a_class_stands_for_all_its_modules(
    halves: GraphAnalysis, name: str, schedule: str
) -> None:
    plan = _plan(halves, stage_pivots=name, partition_num=4, schedule=schedule)
    assert plan.num_stages == 4 and plan.schedule == schedule or schedule == "auto"
    assert {start.removesuffix(".fc") for start in _starts(plan)} <= set(LAYERS)
    _check(plan, halves, stage_pivots=name)


def test_the_even_cut_is_elsewhere(halves: GraphAnalysis) -> None:
    free = _plan(halves, partition_num=2)
    bound = _plan(halves, partition_num=2, stage_pivots="encoder.layer.1")
    assert _starts(bound) == ["encoder.layer.0.fc", "encoder.layer.1.fc"] != _starts(free)
    assert bound.predicted_step_seconds > free.predicted_step_seconds
    # Each plan that is loaded is checked: stages of the other one start where they may not.
    _check(bound, halves, stage_pivots="encoder.layer.1")
    with pytest.raises(
        PlanError, match="stage_pivots asks for encoder.layer.1, and in the plan stage 1 begins at"
    ):
        _check(free, halves, stage_pivots="encoder.layer.1")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stage_pivots": "Blok"}, UnknownModuleError, "did you mean 'Block'"),
        ({"stage_pivots": "Halves"}, StagePinError, "the whole model"),
        (
            {"stage_pivots": "decoder", "stage_starts": "head"},
            StagePinError,
            "at 'head', and stage_pivots does not",
        ),
        (
            {"stage_pivots": "decoder,head", "partition_num": 4},
            InfeasiblePlanError,
            "4 stages are asked for, and",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    halves: GraphAnalysis, options: dict[str, Any], error: type[RanncError], words: str
) -> None:
    with pytest.raises(error) as caught:
        _plan(halves, **options)
    assert words in str(caught.value)


def test_starts_that_must_be_may_be_pivots(halves: GraphAnalysis) -> None:
    plan = _plan(halves, stage_pivots="layer,head", stage_starts="head", partition_num=3)
    assert "head" in _starts(plan) and plan.num_stages == 3


def test_lanes_start_at_pivots_nearest_to_even_shares(halves: GraphAnalysis) -> None:
    plan = _plan(
        halves, 2, stage_pivots="decoder,head,encoder.layer.1", schedule="interleaved", partition_num=4
    )
    assert [len(lane) for lane in plan.lanes] == [2, 2]
    assert _starts(plan) == ["encoder.layer.0.fc", "encoder.layer.1.fc", "decoder.layer.0.fc", "head"]
