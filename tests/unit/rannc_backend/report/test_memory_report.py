"""Memory by stage: the fullest rank counts, what is not known is not said, and the table has both sides."""

from __future__ import annotations

import pytest

from rannc_backend.ir.plan import Plan
from rannc_backend.report.memory_report import KINDS, MemoryReport, memory_report_of
from tests.unit.rannc_backend.ir.sample_plans import sample_plan


def records(plan: Plan, **unknown: None) -> list[dict[str, int | None]]:
    """Rank r holds 1000 bytes and r of each kind."""
    return [dict.fromkeys(KINDS, 1000 + rank) | unknown for rank in range(plan.world_size)]


def test_the_fullest_rank_of_a_stage_counts() -> None:
    plan = sample_plan()
    assert any(len(stage.ranks) > 1 for stage in plan.stages)
    report = memory_report_of(plan, records(plan))
    for stage, planned in zip(report.stages, plan.stages, strict=True):
        assert set(stage.measured.model_dump().values()) == {1000 + max(planned.ranks)}
        cost = planned.predicted
        assert stage.predicted.peak == cost.peak_bytes
        parts = [getattr(stage.predicted, kind) for kind in KINDS if kind != "peak"]
        assert sum(parts) == cost.peak_bytes, "each byte is of one kind"
    assert MemoryReport.model_validate_json(report.model_dump_json()) == report


def test_what_one_rank_does_not_know_is_not_known() -> None:
    plan = sample_plan()
    found = records(plan)
    stage = max(plan.stages, key=lambda stage: len(stage.ranks))
    found[stage.ranks[0]]["peak"] = None
    report = memory_report_of(plan, found)
    assert [item.measured.peak is None for item in report.stages] == [
        item.index == stage.index for item in plan.stages
    ]
    assert str(report).count("not known") == 1


@pytest.mark.parametrize("unknown", [{}, {"optimizer": None}])
def test_the_table_has_both_sides(unknown: dict[str, None]) -> None:
    plan = sample_plan()
    text = str(memory_report_of(plan, records(plan, **unknown)))
    first, head, *rows = text.splitlines()
    assert first == f"memory of {plan.model_name}" and head.split() == [
        "stages", "ranks", "predicted", "measured", "measured", "/", "predicted",
    ]  # fmt: skip
    assert len(rows) == len(KINDS) * len(plan.stages)
    peak = next(row for row in rows if "peak" in row)
    cost = plan.stages[0].predicted
    assert peak.split()[-1] == f"{(1000 + max(plan.stages[0].ranks)) / cost.peak_bytes:.2f}"
    assert all(name in text for name in KINDS.values())
    assert ("not known" in text) == bool(unknown)
