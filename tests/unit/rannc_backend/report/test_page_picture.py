"""The picture of a plan's page in the README shows the page as it is made today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannc_backend.ir.plan_file import read_plan
from scripts.page_picture import COMMAND, PICTURE, PLAN, example_plan, page_digest, shown_page

ROOT = Path(__file__).resolve().parents[4]


def test_the_picture_shows_todays_page() -> None:
    assert shown_page(PICTURE.read_bytes()) == page_digest(read_plan(PLAN)), (
        f"the page has changed: {COMMAND}"
    )
    assert PICTURE.stat().st_size < 200_000
    shown = re.findall(r"!\[[^\]]+\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert str(PICTURE.relative_to(ROOT)) in shown


def test_a_picture_that_does_not_say_what_it_shows() -> None:
    picture = PICTURE.read_bytes()
    assert shown_page(picture.replace(b"tEXtpage", b"tEXtedge")) == ""


@pytest.mark.full
def test_the_pictured_plan_is_that_of_the_example() -> None:
    """Versions of torch may trace other nodes, so the plans are compared by what they decide."""
    found, kept = example_plan(), read_plan(PLAN)
    assert (found.schedule, found.num_micro_batches, found.stage_replicas) == (
        kept.schedule,
        kept.num_micro_batches,
        kept.stage_replicas,
    )
    assert found.predicted_step_seconds == pytest.approx(kept.predicted_step_seconds, rel=0.02)
    assert found.binding.partition(":")[0] == kept.binding.partition(":")[0]
