"""Measured beside predicted: what belongs to which stage, in words and as a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import PlanError, RanncError
from rannc_backend.ir.plan import Plan
from rannc_backend.report.run_report import RunReport, report_of
from tests.unit.rannc_backend.ir.sample_plans import sample_plan


def record_of(plan: Plan, rank: int, **changes: Any) -> dict[str, Any]:
    """A rank that took exactly what was predicted."""
    index = next(iter(plan.stages_of_rank(rank)), None)
    seconds = {f"{name}_seconds": 0.0 for name in ("waiting", "sending", "reducing")}
    record = {
        "stages": {},
        "num_rows": plan.batch_rows,
        "num_micro_batches": plan.num_micro_batches,
        "num_steps": 5,
        "peak_bytes": 0,
        **seconds,
        "step_seconds": plan.predicted_step_seconds,
    }
    if index is not None:
        cost = plan.stages[index].predicted
        record |= {
            "stages": {
                str(index): {
                    "forward_seconds": cost.forward_seconds,
                    "backward_seconds": cost.backward_seconds,
                }
            },
            "waiting_seconds": cost.idle_share * plan.predicted_step_seconds,
            "peak_bytes": cost.peak_bytes,
        }
    return record | changes


def records_of(plan: Plan) -> list[dict[str, Any]]:
    return [record_of(plan, rank) for rank in range(plan.world_size)]


def report_for(plan: Plan, records: list[dict[str, Any]]) -> RunReport:
    report = report_of(plan, records)
    assert report is not None
    return report


def test_what_was_predicted_has_ratio_one() -> None:
    plan = sample_plan()
    report = report_for(plan, records_of(plan))
    assert report.comparable and report.num_steps == 5
    assert report.step_seconds == report.predicted_step_seconds
    for stage, planned in zip(report.stages, plan.stages, strict=True):
        assert stage.structures == tuple(plan.blocks[index].structure for index in planned.blocks)
        assert stage.forward_seconds == stage.predicted_forward_seconds
        assert stage.peak_bytes == stage.predicted_peak_bytes
    assert report.table().count("x1.00") == 1 + 5 * plan.num_stages


def test_a_stage_is_as_slow_and_as_full_as_its_worst_rank() -> None:
    plan = sample_plan(replicas=(1, 2, 1))
    records = records_of(plan)
    middle = plan.stages[1].ranks
    records[middle[0]]["stages"]["1"]["forward_seconds"] = 7.0
    records[middle[1]] |= {"peak_bytes": 10**12, "step_seconds": 1e3}
    report = report_for(plan, records)
    assert (report.stages[1].forward_seconds, report.stages[1].peak_bytes) == (7.0, 10**12)
    assert report.stages[0].forward_seconds == plan.stages[0].predicted.forward_seconds
    assert report.step_seconds == 1e3
    assert report.stages[1].rows == -(-plan.batch_rows // plan.num_micro_batches // 2)


def test_other_batches_are_told_apart() -> None:
    plan = sample_plan()
    records = [record | {"num_rows": plan.batch_rows - 1} for record in records_of(plan)]
    report = report_for(plan, records)
    assert not report.comparable and "differ" in report.table()
    assert report_of(plan, [{} for _ in records]) is None


def test_the_file_reads_back_and_anything_else_is_refused() -> None:
    plan = sample_plan()
    report = report_for(plan, records_of(plan))
    assert RunReport.from_json(report.to_json()) == report
    data = json.loads(report.to_json())
    for wrong in ("", "[]", "{}", json.dumps(data | {"kind": "plan"}), json.dumps(data | {"extra": 1})):
        with pytest.raises(PlanError, match="not a file of a measured run"):
            RunReport.from_json(wrong)
    data["stages"][0]["forward_seconds"] = -1.0
    with pytest.raises(PlanError, match=r"stages\.0\.forward_seconds"):
        RunReport.from_json(json.dumps(data))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_text_is_a_report_or_a_rannc_error(data: st.DataObject) -> None:
    plan = sample_plan()
    text = report_for(plan, records_of(plan)).to_json()
    start = data.draw(st.integers(0, len(text)))
    edited = text[:start] + data.draw(st.text(max_size=3)) + text[start + data.draw(st.integers(0, 3)) :]
    try:
        assert RunReport.from_json(edited).table()
    except RanncError as error:
        assert str(error)
