"""Hand-edited plans: each one is refused with a PlanError that says what to change, or it computes exactly
what the model computes.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from rannc_backend.errors import PlanError, RanncError
from rannc_backend.ir.plan import Plan
from rannc_backend.passes.stage.split_stages import split_stages
from rannc_backend.planner.plan_fits_graph import check_options, check_plan, exact_schedules
from rannc_backend.planner.projection import stage_of_plan
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import SplitModel, split_model

WORLD_SIZE = 4
DEVICE_BYTES = 2**30
Json = dict[str, Any]


class Network(nn.Module):
    """A tied weight, running statistics, a residual and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.tanh(self.norm(self.second(x)))
        y = torch.relu(self.third(y)) + x
        return (y @ self.first.weight).square().mean()


@functools.lru_cache
def network() -> tuple[Network, SplitModel]:
    torch.manual_seed(0)
    module = Network().double()
    return module, split_model(module, {"x": torch.randn(4, 4, dtype=torch.float64)})


@functools.lru_cache
def good_text() -> str:
    """Three stages on four ranks, priced so that each product is worth a stage."""
    from tests.unit.rannc_backend.planner.planning_graphs import plan_stages

    _, model = network()
    cluster = local_cpu(WORLD_SIZE, memory_bytes=DEVICE_BYTES)
    device = replace(
        cluster.device, flops_per_second=(("float32", 1e4), ("float64", 1e4)), launch_seconds=0.0
    )
    plan = plan_stages(
        model.split, model.inputs, model.needs_grad, Config(partition_num=3), world_size=WORLD_SIZE, batch_rows=12,
        fingerprint="f", cluster=replace(cluster, device=device),
    )  # fmt: skip
    assert plan.num_stages == 3 and len(plan.blocks) > 3
    return plan.to_json()


def good() -> Json:
    data: Json = json.loads(good_text())
    return data


def accept(data: Any, **options: object) -> tuple[Plan, dict[str, int]]:
    """What a session does with the text of a file."""
    _, model = network()
    plan = Plan.from_json(data if isinstance(data, str) else json.dumps(data))
    config = Config(**options)  # type: ignore[arg-type]
    check_options(plan, config, exact_schedules(model.split, model.needs_grad))
    stage_of = check_plan(
        plan,
        model.split,
        model.inputs,
        config=config,
        fingerprint="f",
        world_size=WORLD_SIZE,
        device_memory_bytes=DEVICE_BYTES,
        possible_schedules=exact_schedules(model.split, model.needs_grad),
    )
    return plan, stage_of


def run_stages(plan: Plan, stage_of: dict[str, int]) -> dict[str, Tensor]:
    """The model's sums, new buffers and gradients, computed stage by stage; each stage sees its own
    parameters only.
    """
    module, model = network()
    graphs = split_stages(
        model.split.rowwise,
        model.split.outputs,
        model.split.layouts,
        stage_of,
        plan.num_stages,
        input_kinds={item.name: item.kind for item in model.inputs},
        rows_symbol=None,
    )
    stored = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves = {
        name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in stored.items()
    }
    values: dict[str, Tensor] = {}
    for graph in graphs:
        own = {*plan.stages[graph.index].parameters, *(name for name, _ in module.named_buffers())}
        args = []
        for slot in graph.inputs:
            if slot.kind in ("parameter", "buffer"):
                fqn = model.parameter_names[slot.name]
                assert fqn in own, f"stage {graph.index} reads {fqn}"
                args.append(leaves[fqn])
            elif slot.kind == "batch":
                args.append(batch())
            elif slot.kind == "boundary":
                args.append(values[slot.name])
            else:
                args.append(torch.tensor(len(batch())))
        for slot, value in zip(graph.outputs, fx.Interpreter(graph.graph_module).run(*args), strict=True):
            name = f"buffer {slot.fqn}" if slot.kind == "buffer" else slot.name
            assert slot.kind != "buffer" or slot.fqn in plan.stages[graph.index].updated_buffers
            values[name] = value
    sums = [value for name, value in values.items() if value.requires_grad and value.dim() == 0]
    sum(sums).backward()  # type: ignore[union-attr]
    results = {
        name: value.detach()
        for name, value in values.items()
        if name.startswith("buffer") or value.dim() == 0
    }
    return results | {f"gradient {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def batch() -> Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@functools.lru_cache
def expected() -> dict[str, Tensor]:
    """The unedited plan's results, which equal those of the module."""
    module, _ = network()
    found = run_stages(*accept(good_text()))
    whole = copy.deepcopy(module)
    whole(batch()).backward()
    for name, parameter in whole.named_parameters():
        # The graph returns a sum over rows where the module returns a mean.
        scale = found["gradient third.weight"].norm() / whole.third.weight.grad.norm()  # type: ignore[union-attr]
        torch.testing.assert_close(found[f"gradient {name}"], parameter.grad * scale, rtol=1e-9, atol=1e-12)
    return found


def is_exact(data: Any) -> None:
    """Deploying this plan gives what the model gives."""
    found, wanted = run_stages(*accept(data)), expected()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def rebuild(data: Json, node_stage: dict[str, int]) -> None:
    """Move nodes between stages as somebody careful would: a block per stage, parameters and buffers where
    they belong.
    """
    _, model = network()
    order = [name for stage in data["stages"] for name in stage["nodes"]]
    blank = data["blocks"][0]
    blocks = []
    for stage in data["stages"]:
        nodes = [name for name in order if node_stage[name] == stage["index"]]
        parameters, buffers = owned_by(model, nodes)
        shared = {"nodes": nodes, "parameters": parameters}
        stage |= {**shared, "blocks": [len(blocks)] if nodes else [], "updated_buffers": buffers}
        if nodes:
            blocks.append({**blank, **shared, "index": len(blocks)})
    data["blocks"] = blocks


def owned_by(model: SplitModel, nodes: list[str]) -> tuple[list[str], list[str]]:
    from rannc_backend.planner.blocks.staged_nodes import find_staged_nodes

    staged = find_staged_nodes(model.split.rowwise, model.split.layouts, model.inputs)
    kinds = {item.name: item.kind for item in model.inputs}
    reads = {
        model.parameter_names[i.name]
        for node in staged.nodes
        if node.name in nodes
        for i in staged.reads[node]
        if kinds[i.name] == "parameter"
    }
    updates = {output.name: output.fqn for output in model.split.outputs if output.kind == "buffer"}
    # num_batches_tracked counts steps: no row reaches it, and it is updated beside the batch norm.
    own = {updates[name] for name in nodes if name in updates}
    if any("running_mean" in str(name) for name in own):
        own |= {fqn for fqn in updates.values() if "num_batches" in str(fqn)}
    return sorted(reads), sorted(str(name) for name in own)


def stages_of(data: Json) -> dict[str, int]:
    return {name: stage["index"] for stage in data["stages"] for name in stage["nodes"]}


def set_item(*path: Any, value: Any) -> Callable[[Json], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def swap_stages(data: Json) -> None:
    first, last = data["stages"][0], data["stages"][-1]
    for key in ("blocks", "nodes", "parameters", "modules", "updated_buffers"):
        first[key], last[key] = last[key], first[key]


def lose_parameter(data: Json) -> None:
    name = data["stages"][0]["parameters"][0]
    for part in [*data["blocks"], *data["stages"]]:
        part["parameters"] = [other for other in part["parameters"] if other != name]


def add_parameter(data: Json) -> None:
    stage = data["stages"][-1]
    for part in (stage, data["blocks"][stage["blocks"][0]]):
        part["parameters"] = sorted({*part["parameters"], "ghost.weight"})


def rename_node(data: Json) -> None:
    stage = data["stages"][0]
    block = data["blocks"][stage["blocks"][0]]
    block["nodes"][0] = stage["nodes"][0] = "ghost"


def forget_node(data: Json) -> None:
    rebuild(data, stages_of(data))
    for part in (data["blocks"][0], data["stages"][0]):
        part["nodes"] = part["nodes"][1:]


def move_buffers(data: Json) -> None:
    for stage in data["stages"]:
        stage["updated_buffers"] = []


def empty_stage(data: Json) -> None:
    rebuild(data, {name: max(stage, 1) for name, stage in stages_of(data).items()})


def too_large(data: Json) -> None:
    cost = data["stages"][0]["predicted"]
    cost["activation_bytes"] += DEVICE_BYTES
    cost["peak_bytes"] += DEVICE_BYTES


WRONG: dict[str, tuple[Callable[[Json], None], str]] = {
    "schema": (set_item("schema_version", value=1), "schema version 1"),
    "graph": (set_item("fingerprint", value="other"), "another graph"),
    "ranks": (set_item("world_size", value=5), "5 ranks and this run has 4"),
    "fewer ranks": (set_item("world_size", value=2), "plan is for ranks 0 to 1"),
    "rank twice": (set_item("stages", 0, "ranks", value=[0, 1]), "rank 1 is twice in a stage, or in two"),
    "rank outside": (set_item("stages", 0, "ranks", value=[7]), "rank 7 is in a stage"),
    "rank order": (set_item("stages", -1, "ranks", value=[3, 2]), "not in ascending order|twice in a stage"),
    "rows": (set_item("batch_rows", value=1), "replicas|row"),
    "micro-batches": (set_item("num_micro_batches", value=11), "11 micro-batches of 12 rows"),
    "schedule": (set_item("schedule", value="zero_bubble"), "schedule"),
    "recompute": (set_item("stages", 0, "recompute", value=1.5), "recompute"),
    "cyclic": (swap_stages, "not acyclic"),
    "missing parameter": (lose_parameter, "does not list parameter"),
    "extra parameter": (add_parameter, "'ghost.weight', which none of its nodes reads"),
    "unknown node": (rename_node, "'ghost', which the graph does not have"),
    "missing node": (forget_node, "in no stage"),
    "buffers": (move_buffers, "does not list buffer 'norm"),
    "empty stage": (empty_stage, "stage 0 of 3 has no nodes"),
    "memory": (too_large, "stage 0 needs 1.0"),
    "level of ZeRO": (set_item("zero_stage", value=3), "zero_stage"),
    "groups of ZeRO": (set_item("zero_ngroups", value=0), "zero_ngroups"),
    "extra key": (set_item("command", value="rm"), "command"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plans_are_refused_with_what_is_wrong(name: str) -> None:
    change, message = WRONG[name]
    data = good()
    change(data)
    with pytest.raises(PlanError, match=message):
        accept(data)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema_version": 2}', "[" * 10_000, "\x00", good_text()[:-20]]
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        accept(text)


def test_memory_is_counted_from_the_parameters_and_not_from_what_the_file_says() -> None:
    data = good()
    for stage in data["stages"]:
        stage["predicted"] = {
            name: 0 if isinstance(value, int) else 0.0 for name, value in stage["predicted"].items()
        }
    accept(data)
    with pytest.raises(PlanError, match="GB on each of its ranks"):
        accept(data, mem_limit_gb=1e-9)


def test_a_plan_with_offload_is_for_runs_with_it() -> None:
    data = good()
    data["offload"] = "parameters"
    with pytest.raises(PlanError, match="keeps parameters on the host") as caught:
        accept(data)
    assert "set offload to parameters" in str(caught.value)
    accept(data, offload="parameters")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition_num": 2}, "partition_num asks for 2"),
        ({"stage_replicas": "1,1,2,3"}, "asks for"),
        ({"replica_num": 3}, "replica_num asks for 3"),
        ({"pipeline_num": 12}, "pipeline_num asks for 12"),
        ({"schedule": "fill_drain"}, "schedule asks for fill_drain"),
        ({"zero_stage": 1}, "zero_stage asks for 1"),
        ({"offload": "parameters"}, "offload asks for parameters"),
    ],
)
def test_options_that_ask_for_something_else_are_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        accept(good(), **options)
    accept(
        good(),
        partition_num=3,
        schedule=good()["schedule"],
        stage_replicas=",".join(str(len(s["ranks"])) for s in good()["stages"]),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_pins": "first=1"}, "stage_pins asks for first=1, and in the plan it is in stage 0"),
        ({"stage_starts": "norm"}, "stage_starts asks for norm, and in the plan it begins within stage"),
        ({"stage_starts": "thrid"}, "third"),
    ],
)
def test_pins_that_a_loaded_plan_does_not_keep_are_told(options: dict[str, str], message: str) -> None:
    with pytest.raises(RanncError, match=message):
        accept(good_text(), **options)


def test_a_loaded_plan_may_keep_the_pins() -> None:
    accept(good_text(), stage_pins="first=0", stage_starts="first", keep_together="third")


def test_a_module_that_a_loaded_plan_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {good()["stages"][index]["nodes"][0] for index in (0, -1)}
    for node in network()[1].split.rowwise.graph.nodes:
        if node.name in ends:
            monkeypatch.setitem(node.meta, "module_path", "pair.half")
    with pytest.raises(
        RanncError, match="keep_together asks for pair, and in the plan it is in stages 0 and 2"
    ):
        accept(good_text(), keep_together="pair")


def test_a_plan_that_was_computed_is_accepted_and_exact() -> None:
    is_exact(good_text())


def test_moved_nodes_other_replicas_and_settings_are_accepted_and_exact() -> None:
    data = good()
    node_stage = stages_of(data)
    source = next(stage for stage in data["stages"] if len(stage["nodes"]) > 1)
    to_next = source["index"] == 0
    moved = source["nodes"][-1 if to_next else 0]
    rebuild(data, node_stage | {moved: source["index"] + (1 if to_next else -1)})
    data |= {"num_micro_batches": 2, "schedule": "fill_drain"}
    for stage, ranks in zip(data["stages"], ([3], [0, 2], [1]), strict=True):
        stage |= {"ranks": ranks, "recompute": 0.5}
    assert stages_of(data) != node_stage
    is_exact(data)


def paths_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in [(*path, key), *paths_of(value, (*path, key))]]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 14), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.sampled_from(["1f1b", "fill_drain", "ghost"]), st.lists(st.integers(0, 4), max_size=3),
)  # fmt: skip


def edit_value(draw: st.DrawFn, data: Json) -> None:
    path = draw(st.sampled_from(paths_of(data)))
    set_item(*path, value=draw(VALUES))(data)


def edit_structure(draw: st.DrawFn, data: Json) -> None:
    path = draw(st.sampled_from(paths_of(data)))
    parent: Any = functools.reduce(lambda value, key: value[key], path[:-1], data)
    key = path[-1]
    if isinstance(parent, dict):
        value = parent.pop(key)
        if draw(st.booleans()):
            parent[f"{key}_"] = value
    elif draw(st.booleans()):
        parent.append(copy.deepcopy(parent[key]))
    else:
        other = draw(st.integers(0, len(parent) - 1))
        parent[key], parent[other] = parent[other], parent[key]


def move_nodes(draw: st.DrawFn, data: Json) -> None:
    node_stage = stages_of(data)
    for name in draw(st.lists(st.sampled_from(sorted(node_stage)), min_size=1, max_size=2)):
        near = st.sampled_from([max(node_stage[name] - 1, 0), min(node_stage[name] + 1, 2)])
        node_stage[name] = draw(near)
    rebuild(data, node_stage)


def move_boundary(draw: st.DrawFn, data: Json) -> None:
    names = [name for stage in data["stages"] for name in stage["nodes"]]
    first, second = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    rebuild(data, {name: (place >= first) + (place >= second) for place, name in enumerate(names)})


def give_ranks(draw: st.DrawFn, data: Json) -> None:
    order = draw(st.permutations(range(WORLD_SIZE)))
    for index, stage in enumerate(data["stages"]):
        stage["ranks"] = sorted(order[index : index + 1] + (order[3:] if draw(st.booleans()) else []))
    data["num_micro_batches"] = draw(st.integers(0, 13))


EDITS = (edit_value, edit_structure, move_nodes, move_boundary, give_ranks)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.data())
def test_any_edit_is_refused_or_exact(data: st.DataObject) -> None:
    edited = good()
    for edit in data.draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=2)):
        try:
            edit(data.draw, edited)
        except (KeyError, IndexError, TypeError, AttributeError):
            break  # the edit before left nothing to edit here
    try:
        accept(json.dumps(edited))
    except PlanError as error:
        event("refused")
        assert str(error)
        return
    event("accepted")
    is_exact(edited)


def test_check_says_the_same_as_the_projection_of_nodes() -> None:
    _, model = network()
    plan, stage_of = accept(good_text())
    assert stage_of == stage_of_plan(plan, model.split.rowwise, model.split.layouts, model.inputs)
