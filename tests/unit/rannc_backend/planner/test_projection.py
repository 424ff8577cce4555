"""Other graphs of a planned module keep the owners; plans that do not belong to a graph are refused."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from rannc_backend.errors import PlanError, UnsupportedModelError
from rannc_backend.ir.plan import Plan
from rannc_backend.kernels.kept_rows import KEEP_ROWS
from rannc_backend.passes.batch.row_wise import row_wise
from rannc_backend.planner.blocks.staged_nodes import find_staged_nodes
from rannc_backend.planner.projection import note_kept, project_plan, stage_of_plan
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, gpt2, plan_stages, split_model


class Normalized(nn.Module):
    """Reads its parts in another order when `turned`, and one more of them when `extended`; keeps what is made of
    inputs alone when `kept`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False)
        self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.turned = self.extended = self.product = self.kept = False

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        if self.product:
            return shift @ (self.first.weight.sum() * self.third.weight[:1])
        x = torch.relu(self.norm(self.first(x)))
        if self.turned:
            x = self.second(torch.relu(self.third(x)))
        else:
            x = self.third(torch.relu(self.second(x)))
        if self.extended:
            x = self.spare(x)
        if self.kept:
            shift = KEEP_ROWS(shift[:, None], shift.long().expand(-1, 2), 1, 5)[:, 0]
        return x + torch.exp(shift).neg()


def split(**flags: bool) -> SplitModel:
    module = Normalized()
    for name, value in flags.items():
        setattr(module, name, value)
    module.train(flags.get("training", True))
    return split_model(module, {"x": torch.randn(4, 4), "shift": torch.randn(4, 1)})


planned = functools.lru_cache(split)


def plan_of(model: SplitModel, **options: object) -> Plan:
    """On slow devices without launch costs, so that each product is worth a stage."""
    cluster = local_cpu(3, memory_bytes=2**30)
    device = replace(cluster.device, flops_per_second=(("float32", 1e4),), launch_seconds=0.0)
    return plan_stages(
        model.split, model.inputs, model.needs_grad, Config(**options), world_size=3, batch_rows=12, fingerprint="f",
        cluster=replace(cluster, device=device),
    )  # fmt: skip


def check_owners(plan: Plan, model: SplitModel, stages: dict[str, int]) -> None:
    """Every staged node has a stage that owns what it reads, and nothing flows backwards."""
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    assert set(stages) == {node.name for node in staged.nodes}
    placed = {name for stage in plan.stages for name in stage.parameters}
    for node in staged.nodes:
        for stored in staged.reads[node]:
            fqn = model.parameter_names[stored.name]
            stage = plan.stages[stages[node.name]]
            updated_elsewhere = any(
                fqn in other.updated_buffers for other in plan.stages if other is not stage
            )
            assert fqn in stage.parameters or fqn not in placed and not updated_elsewhere
        for user in node.users:
            assert stages.get(user.name, plan.num_stages) >= stages[node.name]


def test_the_planned_graph_projects_onto_an_equal_assignment_of_parameters() -> None:
    model = planned()
    plan = plan_of(model, partition_num=3)
    direct = stage_of_plan(plan, model.split.rowwise, model.split.layouts, model.inputs)
    check_owners(plan, model, direct)
    check_owners(plan, model, project_plan(plan, model.split, model.inputs))


def test_gpt2_evaluates_without_labels_under_its_training_plan() -> None:
    module, batch = gpt2(num_layers=2)
    module.set_attn_implementation("eager")  # torch.export cannot decompose the other one in evaluation
    training = split_model(module, batch)
    plan = plan_of(training, partition_num=3)
    evaluation = split_model(module.eval(), {"input_ids": batch["input_ids"]})
    stages = project_plan(plan, evaluation.split, evaluation.inputs)
    check_owners(plan, evaluation, stages)
    assert set(stages.values()) == {0, 1, 2}


def test_what_needs_inputs_alone_is_computed_where_it_is_read() -> None:
    model = planned()
    plan = plan_of(model, partition_num=3)
    stages = project_plan(plan, model.split, model.inputs)
    chain = [node.name for node in model.split.rowwise.graph.nodes if node.name.startswith(("exp", "neg"))]
    assert chain and all(stages[name] == 2 for name in chain)


def test_what_is_kept_from_step_to_step_has_one_stage_in_all_graphs() -> None:
    row_wise(KEEP_ROWS)
    plan = plan_of(planned(), partition_num=3)
    model = split(kept=True)
    homes: dict[int, int] = {}
    note_kept(homes, model.split, project_plan(plan, model.split, model.inputs))
    assert homes == {5: 2}, "it is not where it is read"
    for home in range(3):
        stages = project_plan(plan, model.split, model.inputs, {5: home})
        note_kept(homes, model.split, stages)
        found = {stages[node.name] for node in model.split.rowwise.graph.nodes if node.target is KEEP_ROWS}
        assert found == {home} and homes == {5: 2}
        check_owners(plan, model, stages)


def test_another_order_of_modules_is_refused_with_the_parameters_name() -> None:
    plan = plan_of(planned(), partition_num=3)
    owners = {name: plan.owners(name) for name in ("second.weight", "third.weight")}
    assert owners["second.weight"] != owners["third.weight"], (
        "the plan does not part the two: nothing is tested"
    )
    turned = split(turned=True)
    with pytest.raises(UnsupportedModelError, match="second.weight"):
        project_plan(plan, turned.split, turned.inputs)


def test_parameters_that_no_stage_owns_together_are_refused_by_name() -> None:
    plan = plan_of(planned(), partition_num=3)
    product = split(product=True)
    with pytest.raises(UnsupportedModelError) as caught:
        project_plan(plan, product.split, product.inputs)
    assert "first.weight" in str(caught.value) and "third.weight" in str(caught.value)
    assert "test_projection.py" in str(caught.value)


def test_a_parameter_that_the_plan_does_not_know_may_be_read_anywhere() -> None:
    plan = plan_of(planned(), partition_num=3)
    extended = split(extended=True)
    check_owners(plan, extended, project_plan(plan, extended.split, extended.inputs))


def edited_plan(plan: Plan, change: str) -> Plan:
    data = json.loads(plan.to_json())
    first, last = data["stages"][0], data["stages"][-1]
    if change == "unknown node":
        block = data["blocks"][first["blocks"][0]]
        block["nodes"].append("ghost")
        first["nodes"].append("ghost")
    elif change == "missing node":
        gone = last["nodes"].pop()
        for block in data["blocks"]:
            block["nodes"] = [name for name in block["nodes"] if name != gone] or ["ghost"]
        if any("ghost" in block["nodes"] for block in data["blocks"]):
            last["nodes"].append("ghost")
    elif change == "backwards":
        for key in ("blocks", "nodes", "parameters", "modules", "updated_buffers"):
            first[key], last[key] = last[key], first[key]
    elif change == "another owner":
        name = first["parameters"][0]
        for part in (data["blocks"][last["blocks"][0]], last):
            part["parameters"].append(name)
    return Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("unknown node", "'ghost', which the graph does not have"),
        ("missing node", "ghost|in no stage"),
        ("backwards", "not acyclic"),
        ("another owner", "lists parameter"),
    ],
)
def test_edited_plans_are_checked_against_the_graph(change: str, message: str) -> None:
    model = planned()
    plan = edited_plan(plan_of(model, partition_num=3), change)
    with pytest.raises(PlanError, match=message):
        stage_of_plan(plan, model.split.rowwise, model.split.layouts, model.inputs)


def plan_cut_before(model: SplitModel, *names: str) -> Plan:
    """A plan by hand: one rank per stage, a stage begins at each of the named nodes."""
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    buffers = {output.name: output.fqn for output in model.split.outputs if output.kind == "buffer"}
    kinds = {item.name: item.kind for item in model.inputs}
    data = json.loads(plan_of(model, partition_num=1).to_json())
    block, stage = data["blocks"][0], data["stages"][0]
    groups: list[list] = [[]]
    for node in staged.nodes:
        if node.name in names:
            groups.append([])
        groups[-1].append(node)
    data["blocks"], data["stages"] = [], []
    for index, nodes in enumerate(groups):
        read = {
            model.parameter_names[i.name]
            for node in nodes
            for i in staged.reads[node]
            if kinds[i.name] == "parameter"
        }
        shared = {"index": index, "nodes": [node.name for node in nodes], "parameters": sorted(read)}
        updated = [buffers[node.name] for node in nodes if node.name in buffers]
        data["blocks"].append({**block, **shared})
        data["stages"].append(
            {**stage, **shared, "blocks": [index], "ranks": [index], "updated_buffers": updated}
        )
    return Plan.from_json(json.dumps(data))


def test_evaluation_reads_running_statistics_where_training_updates_them() -> None:
    model = planned()
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    norm = next(node.name for node in staged.nodes if "batch_norm" in node.name)
    plan = plan_cut_before(model, norm)
    assert "norm.running_mean" in plan.stages[1].updated_buffers
    evaluation = split(training=False)
    stages = project_plan(plan, evaluation.split, evaluation.inputs)
    check_owners(plan, evaluation, stages)
    reads = find_staged_nodes(evaluation.split.rowwise, evaluation.split.layouts, evaluation.inputs).reads
    names = evaluation.parameter_names
    readers = {
        stages[node.name]
        for node, items in reads.items()
        if "norm.running_mean" in {names[item.name] for item in items}
    }
    assert readers == {1}


def test_a_cut_through_batch_statistics_is_refused() -> None:
    model = planned()
    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    fixed = [node for node in staged.fixed if any(user in staged.reads for user in node.users)]
    reader = next(user for user in fixed[0].users if user in staged.reads)
    plan = plan_cut_before(model, reader.name)
    with pytest.raises(PlanError, match="cannot be sent"):
        stage_of_plan(plan, model.split.rowwise, model.split.layouts, model.inputs)
