"""Plans of graphs with lengths: memory for the longest that was announced, seconds at those of the call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rannc_backend.capture.analysis import GraphAnalysis, analyze
from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.log.progress import Progress
from rannc_backend.planner import plan_on_ranks
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_model import plan_analysis
from rannc_backend.planner.plan_on_ranks import GraphToPlan
from rannc_backend.settings.sources import resolve_config
from tests.length_models import LanguageModel, text_batch
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo

SEEN, LONGEST = 16, 512


@pytest.fixture(scope="module")
def analysis() -> GraphAnalysis:
    with fresh_dynamo(begins=True):
        recorder = Recorder()
        batch = text_batch(4, SEEN, 0)
        for value in batch.values():
            torch._dynamo.mark_dynamic(value, 1, min=2, max=LONGEST)
        torch.compile(LanguageModel(), backend=recorder)(**batch)
        (captured,) = recorder.graphs
        assert [(length.hint != SEEN, length.longest) for length in captured.lengths] == [(True, LONGEST)]
        return analyze(captured)


def _plan(graph: GraphToPlan, **options: object) -> Plan:
    config = resolve_config({"stage_compiler": "eager", "plan_cache": False} | options, {})
    question = PlanningQuestion(config=config, cluster=load_cluster("v100-32gb", 2), batch_rows=8)
    return plan_analysis(graph.analysis, question, seen=graph.seen)


def _between(analysis: GraphAnalysis, seen: int, planned: int) -> GraphToPlan:
    # Of two ranks: the longest of all.
    return GraphToPlan.of(analysis, [[seen], [2]], [[planned], [2]])


@pytest.mark.parametrize(("partition_num", "costs"), [(1, "rules"), (1, "analytic"), (2, "rules")])
def test_memory_is_that_of_the_longest_and_time_that_of_the_call(
    analysis: GraphAnalysis, partition_num: int, costs: str
) -> None:
    options = {"partition_num": partition_num, "pipeline_num": 2, "costs": costs, "recompute": "1.0"}
    both = _plan(_between(analysis, SEEN, LONGEST), **options)
    short, long = (_plan(_between(analysis, size, size), **options) for size in (SEEN, LONGEST))
    assert long.stages[0].predicted.activation_bytes > 8 * short.stages[0].predicted.activation_bytes
    if partition_num == 1:
        for stage, of_memory, of_time in zip(both.stages, long.stages, short.stages, strict=True):
            assert stage.predicted.peak_bytes == of_memory.predicted.peak_bytes
            assert stage.predicted.forward_seconds == of_time.predicted.forward_seconds
            assert stage.predicted.backward_seconds == of_time.predicted.backward_seconds
    else:
        assert both.predicted_step_seconds < long.predicted_step_seconds


def test_what_fits_at_the_length_of_the_call_alone_is_no_plan(analysis: GraphAnalysis) -> None:
    cut = {"partition_num": 1, "pipeline_num": 1, "recompute": "1.0", "costs": "rules"}
    peak = max(stage.predicted.peak_bytes for stage in _plan(_between(analysis, SEEN, SEEN), **cut).stages)
    limit = cut | {"mem_limit_gb": (peak + 2**20) / BYTES_PER_GB, "mem_margin": 0.0}
    assert _plan(_between(analysis, SEEN, SEEN), **limit).stages
    with pytest.raises(InfeasiblePlanError):
        _plan(_between(analysis, SEEN, LONGEST), **limit)


@pytest.mark.parametrize(("again", "expected"), [(False, "kept"), (True, "made")])
def test_what_is_measured_again_is_planned_again(
    analysis: GraphAnalysis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: bool, expected: str
) -> None:
    answers = {"plan_analysis": "made", "cached_plan": "kept", "key_of": "", "device_memory_bytes": 0}
    for name, answer in answers.items():
        monkeypatch.setattr(plan_on_ranks, name, lambda *args, answer=answer, **kwargs: answer)
    monkeypatch.setattr(plan_on_ranks, "leading", lambda *args, **kwargs: contextlib.nullcontext())
    config = resolve_config(
        {"stage_compiler": "eager", "cache_dir": str(tmp_path), "profile_again": again}, {}
    )
    found = plan_on_ranks.plan_job(
        _between(analysis, SEEN, SEEN),
        config,
        load_cluster("v100-32gb", 2),
        SimpleNamespace(hosts=("here",)),
        batch_rows=8,
        progress=Progress(),
        profiled=False,
        check=lambda plan: None,
    )
    assert found == expected
