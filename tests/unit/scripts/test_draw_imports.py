"""The drawing of imports: folders, layers, numbers, git revisions; and the page of the architecture has
today's.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.draw_imports import (
    BEFORE,
    LIMITS,
    MARKERS,
    folder_graph,
    layers_of,
    mermaid,
    numbers,
    page_with,
    section,
    shown_edges,
    sources,
    text,
)

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "rannc_backend/__init__.py": "",
    "rannc_backend/session.py": "from rannc_backend.middle import plan",
    "rannc_backend/top/__init__.py": "",
    "rannc_backend/top/api.py": "from rannc_backend import session, __version__\n"
    "from rannc_backend.low import data",
    "rannc_backend/middle/__init__.py": "",
    "rannc_backend/middle/plan.py": "def later():\n    from rannc_backend.low.data import Data",
    "rannc_backend/low/__init__.py": "",
    "rannc_backend/low/data.py": "import torch\nimport rannc_backend.passes.stage.cut",
    "passes/__init__.py": "",
    "passes/stage/__init__.py": "",
    "passes/stage/cut.py": "from rannc_backend.passes import stage",
}


def test_layers() -> None:
    assert layers_of(folder_graph(FILES)) == {
        "passes": 0,
        "passes.stage": 0,
        "low": 1,
        "middle": 2,
        "rannc_backend": 3,
        "top": 4,
    }


def test_numbers() -> None:
    assert numbers(FILES) == {
        "modules": 5,
        "folders": 6,
        "layers": 5,
        "dependencies between folders": 5,
        "upward dependencies": 0,
        "modules at the root": 1,
        "modules in the largest folder": 1,
    }


def test_a_cycle_is_upward_in_the_numbers_and_in_both_drawings() -> None:
    files = {
        **FILES,
        "rannc_backend/low/data.py": "from rannc_backend.top.api import x",
    }
    graph = folder_graph(files)
    # top, the root, middle and low import each other in a ring, and top imports low besides.
    assert numbers(files)["upward dependencies"] == 5
    assert "n_low ==> n_top" in mermaid(graph) and "low: top (upward)" in text(graph)


def test_a_drawing_leaves_out_what_follows() -> None:
    graph = folder_graph(FILES)
    assert graph.has_edge("top", "low") and ("top", "low") not in shown_edges(graph)
    assert "n_top --> n_rannc_backend" in mermaid(graph) and 'n_low["low"]' in mermaid(graph)
    assert mermaid(graph).count("subgraph") == 5
    assert " 0  passes: nothing" in text(graph).splitlines()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_revision_is_read_from_git(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    for path, content in {**FILES, "kernels/__init__.py": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "rannc_backend/session.py").write_text("", encoding="utf-8")
    assert sources("HEAD", tmp_path)["rannc_backend/session.py"] == FILES["rannc_backend/session.py"]
    assert sources("", tmp_path)["rannc_backend/session.py"] == ""


def test_the_page_shows_todays_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = section(sources(), json.loads(BEFORE.read_text(encoding="utf-8")))
    assert page_with(page, part) == page, "run `make docs`"
    assert page.count(MARKERS[0]) == page.count(MARKERS[1]) == 1


def test_the_table_of_folders_goes_downward() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| `([\w/]+)/`(?: \(root\))? \| ", page, re.MULTILINE)
    rows = {cell.replace("/", "."): number for number, cell in enumerate(cells)}
    graph = folder_graph(sources())
    assert set(rows) == set(graph) and len(cells) == len(rows)
    assert not [edge for edge in graph.edges if rows[edge[0]] >= rows[edge[1]]]


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_are_kept(name: str) -> None:
    limit = sum(int(part) for part in LIMITS[name].split(" and "))  # "30 and 4": four that were reserved
    assert numbers(sources())[name] <= limit
