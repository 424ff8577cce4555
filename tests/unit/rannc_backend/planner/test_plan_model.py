"""Planning without ranks: models on meta, any number of devices, and the same plan as from a real model."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from rannc_backend.capture.nonstrict.meta_model import convert_model
from rannc_backend.errors import BlocksFileError, InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import Plan
from rannc_backend.log.step_timer import StepTimer
from rannc_backend.planner.blocks_file import PlannableModel, is_blocks_file
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.cost.pricing import BUDGETS, FINE_BUDGETS, NoPartitions
from rannc_backend.planner.plan_blocks import PlanningQuestion, plan_prepared
from rannc_backend.planner.plan_model import analyze_model, plan_model, prepare
from rannc_backend.settings.sources import resolve_config
from tests.choice import mostly
from tests.models_huggingface import LENGTH, mixtral
from tests.unit.rannc_backend.capture.capture_harness import fresh_dynamo
from tests.unit.rannc_backend.planner.planning_examples import SMALL, small_example

CONFIG = resolve_config({"max_partition_num": 12, "stage_compiler": "eager"}, {})
CLUSTER = load_cluster("v100-32gb", 4)


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo():
        yield


class Layers(nn.Module):
    """The loss is inside if there are labels."""

    def __init__(self, width=64, num_layers=6):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers))
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x, labels=None):
        logits = self.head(self.layers(x))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


def _layers(device="meta", rows=2, loss=True, **sizes):
    with torch.device(device):
        model = Layers(**sizes)
        kwargs = {"labels": torch.zeros(rows, dtype=torch.long)} if loss else {}
        return model, (torch.zeros(rows, model.head.in_features),), kwargs


def _plan(example, num_devices=4, batch_rows=32, config=CONFIG, dtype=None, **asked):
    return plan_model(*example, _question(config, num_devices, batch_rows, **asked), dtype=dtype)


def _question(config=CONFIG, num_devices=4, batch_rows=32, **more):
    return PlanningQuestion(
        config=config, cluster=replace(CLUSTER, num_devices=num_devices), batch_rows=batch_rows, **more
    )


_BY_DEFAULT = ("gpt2",)  # nothing in the others that planning has not met in this one


@pytest.mark.parametrize("name", mostly(SMALL, _BY_DEFAULT))
def test_a_model_on_meta_is_planned(name):
    with torch.device("meta"):
        model, args, kwargs = small_example(name)
    plan = _plan((model, args, kwargs), config=CONFIG.model_copy(update={"partition_num": 2}))
    assert plan.num_stages == 2 and plan.world_size == 4 and plan.batch_rows == 32
    assert plan.model_name == type(model).__name__ and plan.cluster.name == "v100-32gb"
    assert {name for stage in plan.stages for name in stage.parameters} == set(dict(model.named_parameters()))
    assert Plan.from_json(plan.to_json()) == plan
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("loss", [True, False])
def test_the_plan_of_a_real_model_is_that_of_its_shapes(loss):
    plans = {
        _plan(_layers("meta", 2, loss)).to_json(),
        _plan(_layers("meta", 5, loss)).to_json(),  # the example batch is not what is planned for
        _plan(_layers("cpu", 3, loss)).to_json(),
    }
    assert len(plans) == 1
    plan = Plan.from_json(plans.pop())
    assert plan.schedule == ("1f1b" if loss else "fill_drain")


def test_inputs_and_parts_that_are_real_go_with_the_others():
    model, _, _ = _layers("meta")
    model.head = nn.Linear(64, 8)
    example = (model, (torch.randn(3, 64),), {"labels": torch.zeros(3, dtype=torch.long)})
    assert _plan(example).to_json() == _plan(_layers()).to_json()


def test_more_devices_than_any_machine_has():
    plan = _plan(
        _layers(num_layers=3),
        num_devices=512,
        batch_rows=4096,
        config=CONFIG.model_copy(update={"stage_replicas": "256,256"}),
    )
    assert plan.world_size == 512 and plan.stage_replicas == (256, 256)
    assert plan.cluster.num_devices == 512 and plan.cluster.devices_per_node == CLUSTER.devices_per_node


def test_a_dtype_is_given_to_floats_only():
    full, half = _plan(_layers()), _plan(_layers(), dtype=torch.bfloat16)
    sizes = [sum(block.parameter_bytes for block in plan.blocks) for plan in (full, half)]
    assert sizes[0] == 2 * sizes[1]
    assert full.fingerprint != half.fingerprint


def test_memory_that_does_not_do_is_an_error_with_what_would():
    config = CONFIG.model_copy(update={"mem_limit_gb": 1e-5})
    with pytest.raises(InfeasiblePlanError, match="smallest"):
        _plan(_layers(), config=config)


def test_rules_trace_no_block_and_choose_much_the_same(monkeypatch):
    priced = CONFIG.model_copy(update={"stage_replicas": "2,2", "recompute": "1"})
    traced = _plan(_layers(), config=priced)
    monkeypatch.setattr(
        "rannc_backend.planner.plan_model.partition_blocks", None
    )  # a block that is traced is an error
    rules = _plan(_layers(), config=priced.model_copy(update={"costs": "rules"}))
    assert [stage.blocks for stage in rules.stages] == [stage.blocks for stage in traced.stages]
    assert rules.blocks == traced.blocks and rules.predicted_step_seconds == pytest.approx(
        traced.predicted_step_seconds, rel=0.3
    )
    assert {stage.recompute for stage in rules.stages} == {1.0}
    halved = _plan(_layers(), config=priced.model_copy(update={"costs": "rules", "recompute": "0.5"}))
    assert {stage.recompute for stage in halved.stages} == {0.5}


def test_blocks_without_partitions_are_not_planned_as_if_they_had_some():
    rules = CONFIG.model_copy(update={"costs": "rules"})
    model = prepare(analyze_model(*_layers(), cluster=CLUSTER), _question(rules))
    assert plan_prepared(model, _question(rules)).num_stages >= 1
    with pytest.raises(BlocksFileError, match="costs='rules', and now it is 'analytic'"):
        plan_prepared(model, _question(CONFIG))


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_as_transformers_writes_them_keep_rows_apart(experts: str):
    model, tokens = mixtral(torch.float32, experts=experts), torch.zeros(2, LENGTH, dtype=torch.long)
    analysis = analyze_model(model, (tokens,), {}, cluster=CLUSTER)
    assert analysis.split.whole_batch is None


def test_conversion_keeps_ties_and_what_needs_none():
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4, dtype=torch.float64), "b": nn.Linear(4, 4), "n": nn.BatchNorm1d(4)}
    )
    model["a"].weight = model["b"].weight
    model["b"].bias.requires_grad_(False)
    kept = copy.copy(dict(model.named_parameters()))
    convert_model(model)
    assert all(model.get_parameter(name) is parameter for name, parameter in kept.items())
    convert_model(model, device=torch.device("meta"), dtype=torch.float16)
    assert model["a"].weight is model["b"].weight and isinstance(model["a"].weight, nn.Parameter)
    assert {str(tensor.device) for tensor in model.state_dict().values()} == {"meta"}
    assert not model["b"].bias.requires_grad and model["a"].bias.requires_grad
    dtypes = {name: tensor.dtype for name, tensor in model["n"].state_dict().items()}
    assert dtypes["running_mean"] == torch.float16 and dtypes["num_batches_tracked"] == torch.int64


def test_each_step_is_told_once_and_in_order():
    steps = []
    _plan(_layers(), step_timer=StepTimer(log=steps.append))
    assert [step.name for step in steps] == ["capture", "analysis", "blocks", "prices", "search"]
    assert "distinct" in steps[2].detail and "stages" in steps[4].detail


def test_a_model_without_blocks_has_one_stage():
    graph = BlockGraph(blocks=(), flows=(), parameters=())
    model = PlannableModel.of(
        graph,
        NoPartitions(),
        fingerprint="0" * 64,
        model_name="Nothing",
        schedules=["fill_drain"],
        config=CONFIG,
    )
    plan = _plan_prepared(PlannableModel.from_json(model.to_json()))
    assert plan.num_stages == 1 and plan.blocks == ()


@pytest.fixture(scope="module")
def prepared():
    analysis = analyze_model(*_layers(), cluster=CLUSTER)
    return prepare(analysis, _question())


def test_models_that_do_not_fit_on_one_device_have_finer_budgets(prepared):
    """25,480 parameters: themselves, their gradients and Adam's state are 16 bytes each."""
    assert prepared.budgets == BUDGETS
    analysis = analyze_model(*_layers(), cluster=CLUSTER)
    for limit, budgets in ((3.79e-4, FINE_BUDGETS), (3.80e-4, BUDGETS)):
        config = CONFIG.model_copy(update={"mem_limit_gb": limit})
        assert prepare(analysis, _question(config)).budgets == budgets


def _plan_prepared(model, config=CONFIG, num_devices=4):
    return plan_prepared(model, _question(config, num_devices))


def test_blocks_from_a_file_give_the_same_plan_and_plans_for_other_devices(tmp_path, prepared):
    text = prepared.to_json()
    path = tmp_path / "blocks.json"
    path.write_text(text)
    assert is_blocks_file(str(path)) and not is_blocks_file(str(tmp_path)) and not is_blocks_file(__file__)
    again = PlannableModel.read(str(path))
    assert again.to_json() == text
    assert _plan_prepared(again).to_json() == _plan_prepared(prepared).to_json() == _plan(_layers()).to_json()
    other = _plan_prepared(
        again, num_devices=7, config=CONFIG.model_copy(update={"mem_limit_gb": 2.0, "partition_num": 3})
    )
    assert (other.world_size, other.num_stages) == (7, 3)


def test_a_schedule_that_blocks_cannot_have_is_said(prepared, caplog):
    assert _plan_prepared(prepared, CONFIG.model_copy(update={"schedule": "zb_h1"})).schedule == "zb_h1"
    assert not _warnings(caplog)
    older = dataclasses.replace(prepared, schedules=("1f1b", "fill_drain"))
    plan = _plan_prepared(older, CONFIG.model_copy(update={"schedule": "zb_h1"}))
    assert plan.schedule in ("1f1b", "fill_drain")
    (said,) = _warnings(caplog)
    assert said.startswith("schedule zb_h1 is not possible with these blocks (") and said.endswith(
        "of 1f1b, fill_drain"
    )
    caplog.clear()
    assert _plan_prepared(older).schedule in ("1f1b", "fill_drain") and not _warnings(caplog)


def _warnings(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if text.startswith("schedule ")]


def test_blocks_made_under_other_options_are_refused(prepared):
    with pytest.raises(BlocksFileError, match="max_partition_num='12', and now it is '5'"):
        _plan_prepared(prepared, CONFIG.model_copy(update={"max_partition_num": 5}))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("{", "[", "not JSON"),
        ('"rannc blocks 7"', '"rannc blocks 9"', "not of the format"),
        ('"expressions":[', '"expressions":[7,', "not a list of texts"),
        (
            '"expressions":["',
            '"expressions":["__import__(\\"os\\")',
            "no part of an expression|no expression",
        ),
        ('"fingerprint":"', '"fingerprint":7,"x":"', "not an object with"),
        ('"index":1,', '"index":2,', "not numbered"),
        ('"num_forward_launches":1', '"num_forward_launches":true', "True is no int"),
        ('"saved_bytes":', '"saved_bytes":-1,"x":', "not an object"),
        ('"producer":0', '"producer":9000', "runs backwards"),
        ('"schedules":["1f1b"', '"schedules":["zero_bubble"', "none of"),
        ('"trainable":true', '"trainable":1', "1 is no bool"),
        ('"budgets":[1.0', '"budgets":[2.0', "do not go down from 1"),
        ('"partition_of":[[0', '"partition_of":[[100000', "that is not there"),
        ('"partition_of":[[0,', '"partition_of":[[', "one number per budget"),
        ('"parameters":["layers.0.0.', '"parameters":["layers.9.0.', "is not described"),
    ],
)
def test_files_that_are_not_valid_are_refused_with_the_place(prepared, old, new, text):
    good = prepared.to_json()
    assert old in good
    with pytest.raises(BlocksFileError, match=text):
        PlannableModel.from_json(good.replace(old, new, 1))


def test_autocast_is_planned_as_it_runs():
    model, args, kwargs = _layers()
    config = CONFIG.model_copy(update={"autocast": "bfloat16"})
    analysis = analyze_model(model, args, kwargs, cluster=CLUSTER, config=config)
    values = [node.meta.get("val") for node in analysis.captured.graph_module.graph.nodes]
    assert torch.bfloat16 in {value.dtype for value in values if isinstance(value, torch.Tensor)}
