"""What runs the stages where the options leave it open: a fixed rule, which the plan records and everything
after it follows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rannc_backend.errors import BlocksFileError, PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.cost.small_models import SMALL_MODEL_ELEMENTS, settled
from rannc_backend.planner.plan_blocks import PlanningQuestion, plan_prepared
from rannc_backend.planner.plan_fits_graph import check_options
from rannc_backend.planner.plan_model import analyze_model, plan_model, prepare
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.capture.capture_harness import fresh_dynamo


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo():
        yield


def _question(cluster: str = "generic-cpu", **options: object) -> PlanningQuestion:
    return PlanningQuestion(
        config=Config(costs="rules", **options), cluster=load_cluster(cluster, 2), batch_rows=8
    )


def _model(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict]:
    with torch.device("meta"):
        return (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)),
            (torch.zeros(2, width),),
            {},
        )


@given(
    st.integers(0, 2**40), st.sampled_from(["cpu", "cuda"]), st.sampled_from(["auto", "eager", "inductor"])
)
def test_the_rule(num_elements: int, kind: str, asked: str) -> None:
    chosen = settled(Config(stage_compiler=asked), kind, num_elements).stage_compiler
    if asked != "auto":
        assert chosen == asked
    else:
        assert chosen == ("eager" if kind == "cpu" and num_elements < SMALL_MODEL_ELEMENTS else "inductor")


@pytest.mark.parametrize(
    ("cluster", "options", "width", "expected"),
    [
        ("generic-cpu", {}, 8, "eager"),
        ("generic-cpu", {"stage_compiler": "inductor"}, 8, "inductor"),
        ("generic-cpu", {}, 7100, "inductor"),
        ("v100-32gb", {}, 8, "inductor"),
        ("v100-32gb", {"stage_compiler": "eager"}, 8, "eager"),
    ],
)
def test_the_plan_records_it(cluster: str, options: dict, width: int, expected: str) -> None:
    plan = plan_model(*_model(width), _question(cluster, **options))
    assert plan.stage_compiler == expected
    assert Plan.from_json(plan.to_json()) == plan


def test_blocks_for_cpus_are_not_planned_for_gpus() -> None:
    question = _question()
    model, args, kwargs = _model()
    prepared = prepare(analyze_model(model, args, kwargs, cluster=question.cluster), question)
    assert plan_prepared(prepared, question).stage_compiler == "eager"
    with pytest.raises(BlocksFileError, match="stage_compiler='eager', and now it is 'inductor'"):
        plan_prepared(prepared, _question("v100-32gb"))


def test_a_loaded_plan_is_what_the_options_ask_for() -> None:
    plan = plan_model(*_model(), _question())
    for asked in ("auto", "eager"):
        check_options(plan, Config(stage_compiler=asked, deployment_file="plan.json"), ("1f1b", "fill_drain"))
    with pytest.raises(
        PlanError, match="stage_compiler asks for inductor, and the plan in 'plan.json' has eager"
    ):
        check_options(
            plan, Config(stage_compiler="inductor", deployment_file="plan.json"), ("1f1b", "fill_drain")
        )


def test_a_plan_of_before_says_inductor() -> None:
    plan = plan_model(*_model(), _question())
    text = plan.to_json()
    old = text.replace('"stage_compiler": "eager",', "").replace('"stage_compiler":"eager",', "")
    assert old != text and Plan.from_json(old).stage_compiler == "inductor"


def test_stages_run_as_the_plan_says(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="rannc_backend"):
        model = torch.compile(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="rannc", options={"verbose": True}
        )
        model(torch.randn(3, 4)).sum().backward()
    texts = [record.getMessage() for record in caplog.records]
    assert any("stage 0" in text and "eager" in text for text in texts), texts
    assert (
        sum("stages run operator by operator: with 20 parameters on CPUs" in text for text in texts) == 1
    ), texts
