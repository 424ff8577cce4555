"""docs/coming_from.md against the code: every option, value, public name and link in it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rannc_backend
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
# The second column of the tables: what to write here.
OURS = [
    line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and line.count(" | ") >= 2
]
VALUES = sorted({found for cell in OURS for found in re.findall(r'`(\w+)=("[^"`]*"|[\w.]+)`', cell)})
NAMES = sorted({found for cell in OURS for found in re.findall(r"`rannc_backend\.(\w+)", cell)})
SYSTEMS = (
    "RaNNC",
    "nnScaler's AutoDist",
    "Easy Parallel Library (EPL)",
    "DeepSpeed",
    "FSDP",
    "torch.distributed.pipelining",
)


@pytest.mark.parametrize(("option", "value"), VALUES)
def test_options_take_these_values(option: str, value: str) -> None:
    given = value.strip('"')
    typed = {"True": True, "False": False}.get(given, given)
    if not value.startswith('"') and isinstance(typed, str):
        typed = float(typed) if "." in typed else int(typed)
    assert option in Config.model_fields
    assert resolve({option: typed}, {}).config.model_fields_set >= {option}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_public(name: str) -> None:
    assert name in rannc_backend.__all__


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([\w.]*)(?:#([\w-]+))?\)", PAGE):
        text = (DOCS / target).read_text(encoding="utf-8") if target else PAGE
        headings = [
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        ]
        assert not anchor or anchor in headings, (target, anchor)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_section_with_a_table(system: str) -> None:
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    assert section.count("\n| ") >= 8
