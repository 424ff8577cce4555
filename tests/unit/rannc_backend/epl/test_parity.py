"""docs/epl_parity.md against the code: every item with its options, every test that it names, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rannc_backend
from rannc_backend import epl
from rannc_backend.epl.items import CATEGORIES, ITEMS
from rannc_backend.settings.options import Config
from tests.distributed.test_epl import EQUAL, OTHERS

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "epl_parity.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+\.\w+` \|", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
# What a function of the package does, or always happens.
NO_OPTION = (
    "amp.loss_scale", "communication.clip_after_allreduce",
    "io.slicing", "io.unbalanced_io_slicing", "io.drop_last_files",
)  # fmt: skip


def test_every_item_has_its_row() -> None:
    assert list(ROWS) == list(ITEMS)
    assert CATEGORIES == (
        "pipeline", "gradient_checkpoint", "zero", "offload", "amp", "optimizer", "cluster", "communication", "io", "auto",
    )  # fmt: skip


@pytest.mark.parametrize("item", list(ITEMS))
def test_a_row_names_its_options(item: str) -> None:
    cells = ROWS[item]
    assert len(cells) == 5, "item, documented, here, decided, shown by"
    named = {name for name in re.findall(r"`(\w+)[`=]", cells[2]) if name in Config.model_fields}
    assert named == set(ITEMS[item].options)
    assert (item in NO_OPTION) == (not named)


@pytest.mark.parametrize("item", list(ITEMS))
def test_a_row_names_a_test(item: str) -> None:
    shown = ROWS[item][-1].strip("| ")
    for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, shown
    cases = {case.name.removeprefix("epl-") for case in (*EQUAL, *OTHERS)}
    if shown.startswith("`test_epl`"):
        assert set(re.findall(r"`([\w-]+)`", shown)) - {"test_epl"} <= cases, shown
    elif not shown.startswith("`tests/"):
        assert (ROOT / "tests" / "distributed" / f"{shown.strip('`')}.py").is_file(), shown


def test_tests_of_the_page_exist() -> None:
    for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE):
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:examples|docs)/\w+\.\w+)`", PAGE):
        assert (ROOT / path).is_file(), path


def test_public_names_exist() -> None:
    for name in re.findall(r"`epl\.(\w+)\(", PAGE):
        assert name in (*epl.__all__, "replicate", "split"), name
    for name in re.findall(r"`rannc_backend\.(\w+)", PAGE):
        assert name in rannc_backend.__all__, name


@pytest.mark.parametrize("item", [item for item in ITEMS if getattr(ITEMS[item], "choices", None)])
def test_values_of_a_row_exist(item: str) -> None:
    for value in re.findall(r"`(\w+)`", ROWS[item][2]):
        assert value in {*ITEMS[item].options, *map(str, ITEMS[item].choices.values())}, value  # type: ignore[union-attr]
