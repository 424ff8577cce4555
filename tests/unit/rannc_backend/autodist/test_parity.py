"""docs/autodist_parity.md against the code: every item has its row, its options are real, and the test that shows it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannc_backend.autodist import AutoDistConfig
from tests.unit.rannc_backend.autodist.test_config import DOCUMENTED

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "autodist_parity.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
}
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "unit").rglob("test_*.py"))


def test_every_item_has_a_row_in_the_order_of_the_class() -> None:
    assert list(ROWS) == list(AutoDistConfig.model_fields)


@pytest.mark.parametrize("item", sorted(ROWS))
def test_a_row_says_what_the_item_becomes_and_what_shows_it(item: str) -> None:
    _, document, here, _, shown = ROWS[item]
    assert document and here
    options = DOCUMENTED[item][2]
    assert all(f"`{option}`" in here or option == item for option in options), options
    names = re.findall(r"`(test_\w+)`", shown)
    assert names and all(f"def {name}(" in TESTS for name in names)
