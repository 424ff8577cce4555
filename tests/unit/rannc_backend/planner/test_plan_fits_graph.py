"""Whether a graph's outputs come back under a plan, which may have been made for another graph of the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.passes.stage.recompute import segments_of
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_fits_graph import (
    check_options,
    choose_schedule,
    cut_by_plan,
    exact_schedules,
    outputs_left_out,
)
from rannc_backend.planner.plan_model import analyze_model, plan_analysis
from rannc_backend.planner.projection import recomputed_nodes, stage_of_plan
from rannc_backend.schedule.edges import OUTPUT
from rannc_backend.settings.options import Config
from rannc_backend.stages.cut_stages import OutputsLeftOut
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

CLUSTER = local_cpu(2)
ROWS = 32
WIDTH = 1000


class Head(nn.Module):
    """Logits of some size, and a loss of them."""

    def __init__(self, *, gives_loss: bool) -> None:
        super().__init__()
        self.body, self.head, self.gives_loss = nn.Linear(8, 8), nn.Linear(8, WIDTH), gives_loss

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(torch.tanh(self.body(x)))
        return (logits.square().mean(), logits) if self.gives_loss else (logits.sigmoid(),)


def planned(*, gives_loss: bool = True, **options: Any) -> tuple[Plan, GraphAnalysis, dict[str, int]]:
    analysis = analyze_model(Head(gives_loss=gives_loss), (torch.randn(4, 8),), {}, cluster=CLUSTER)
    config = Config(costs="analytic", partition_num=2, stage_compiler="eager", **options)
    plan = plan_analysis(analysis, PlanningQuestion(config=config, cluster=CLUSTER, batch_rows=ROWS))
    split = analysis.split
    return plan, analysis, stage_of_plan(plan, split.rowwise, split.layouts, analysis.captured.inputs)


def left_out(
    plan: Plan, analysis: GraphAnalysis, stage_of: dict[str, int], outputs: str = "auto"
) -> OutputsLeftOut:
    return outputs_left_out(plan, analysis, stage_of, [(), ()], Config(outputs=outputs))


def test_options_come_before_the_plan_and_the_plan_before_its_memory() -> None:
    plan, analysis, stage_of = planned()
    assert not plan.outputs_left_out and left_out(plan, analysis, stage_of) == OutputsLeftOut()
    full = plan.model_copy(update={"outputs_left_out": "no room"})
    assert left_out(full, analysis, stage_of) == OutputsLeftOut("no room")
    assert left_out(full, analysis, stage_of, "all") == OutputsLeftOut()
    assert left_out(plan, analysis, stage_of, "loss") == OutputsLeftOut(
        "option outputs is 'loss'", always=True
    )
    asked, *rest = planned(outputs="loss")
    assert "was made with" in left_out(asked, *rest).why and not left_out(asked, *rest).always


def test_a_graph_without_a_loss_gives_its_outputs() -> None:
    plan, analysis, stage_of = planned(gives_loss=False)
    assert plan.outputs and not plan.outputs_left_out
    full = plan.model_copy(update={"outputs_left_out": "no room"})
    assert left_out(full, analysis, stage_of) == OutputsLeftOut()


def test_a_plan_that_knows_no_outputs_is_asked_for_room() -> None:
    """As a plan of before the outputs were in it, or of another graph of the model."""
    plan, analysis, stage_of = planned(outputs="loss")
    unaware = plan.model_copy(update={"outputs": (), "outputs_left_out": ""})
    peaks = [stage.predicted.peak_bytes for stage in plan.stages]
    own = math.ceil(ROWS / 2) * WIDTH * 4
    maker = plan.outputs[0].stage
    needed = [own + ROWS * WIDTH * 4 * (index == maker) for index in range(2)]

    def limited(num_bytes: float) -> str:
        limit = {"memory_limit_bytes": int(num_bytes)}
        return left_out(unaware.model_copy(update=limit), analysis, stage_of).why

    enough = max(peak + 2 * size for peak, size in zip(peaks, needed, strict=True))
    assert not limited(enough)
    assert "each rank of stage" in limited(enough - 2)


@pytest.mark.parametrize("why", ["", "no room"])
def test_stages_hand_outputs_on_where_they_come_back(why: str) -> None:
    plan, analysis, stage_of = planned()
    plan = plan.model_copy(update={"outputs_left_out": why})
    cut = cut_by_plan(plan, analysis, stage_of, [(), ()], Config())
    way = (plan.outputs[0].stage, OUTPUT)
    assert way in cut.edges_in(training=False)
    assert (way in cut.edges_in(training=True)) == (not why)


def test_a_plan_without_outputs_is_not_what_outputs_all_asks_for() -> None:
    plan, analysis, _ = planned(outputs="loss")
    schedules = exact_schedules(analysis.split, analysis.needs_grad)
    check_options(plan, Config(), schedules)
    with pytest.raises(PlanError, match="the option outputs asks for all"):
        check_options(plan, Config(outputs="all"), schedules)


def test_a_schedule_that_is_not_possible_is_said_where_it_is_wished(caplog: pytest.LogCaptureFixture) -> None:
    _, analysis, _ = planned()
    asked = Config(schedule="zb_h1")
    assert choose_schedule(analysis.split, analysis.needs_grad, asked, says_so=True) == "zb_h1"
    for says_so in (False, True):
        assert choose_schedule(analysis.split, (), asked, says_so=says_so) == "fill_drain"
        assert [record.levelname for record in caplog.records].count("WARNING") == says_so
    assert "schedule zb_h1 is not possible (the model returns no loss); fill_drain is used" in caplog.text


def test_nodes_of_another_graph_belong_to_the_segments_of_their_parameters() -> None:
    plan, analysis, stage_of = planned(recompute="segments")
    numbers = recomputed_nodes(plan, analysis).segment_of
    assert numbers == {name: block.segment for block in plan.blocks for name in block.nodes}
    parted = plan.model_copy(
        update={"blocks": tuple(block.model_copy(update={"segment": block.index}) for block in plan.blocks)}
    )
    _, other, _ = planned(gives_loss=False)
    found = recomputed_nodes(parted, other).segment_of
    by_parameter = {name: block.segment for block in parted.blocks for name in block.parameters}
    assert set(found.values()) == set(by_parameter.values())
    order = [found[node.name] for node in other.split.rowwise.graph.nodes if node.name in found]
    assert order == sorted(order) and order[-1] == by_parameter["head.weight"]
    cut = cut_by_plan(parted, analysis, stage_of, [(), ()], Config())
    assert any(mark > 0 for graph in cut.graphs for mark in segments_of(graph.graph_module))
    kept = plan.model_copy(update={"stages": planned()[0].stages})
    assert recomputed_nodes(kept, analysis).segment_of == {}


def test_modules_that_are_computed_again_are_found_in_every_graph_by_their_names() -> None:
    plan, analysis, stage_of = planned(recompute_modules="head")
    assert plan.told_recompute == "head"
    _, other, _ = planned(gives_loss=False)
    for graph in (analysis, other):
        named = {
            node.name
            for node in graph.split.rowwise.graph.nodes
            if node.meta.get("module_path") == "head" and node.op == "call_function"
        }
        assert named and recomputed_nodes(plan, graph).segment_of == dict.fromkeys(named, 0)
    cut = cut_by_plan(plan, analysis, stage_of, [(), ()], Config())
    assert any(mark >= 0 for graph in cut.graphs for mark in segments_of(graph.graph_module))
    schedules = exact_schedules(analysis.split, analysis.needs_grad)
    check_options(plan, Config(recompute_modules="head"), schedules)
    for config in (Config(recompute_modules="body"), Config(recompute="marked")):
        with pytest.raises(PlanError, match="the option recompute"):
            check_options(plan, config, schedules)
