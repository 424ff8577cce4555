"""Every sentence of SECURITY.md's tables has tests, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {"": "tests/unit/rannc_backend", "distributed ": "tests/distributed"}
HEAD, RULE = "| what holds | test |", "|---|---|"
REFERENCE = re.compile(r"(distributed )?`(test_\w+\.py)::(test_\w+)`")


def rows(text: str) -> list[tuple[str, str]]:
    """(sentence, tests) of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|") and line not in (HEAD, RULE)]
    return [(first.strip(), second.strip()) for first, second in (line.strip("|").split("|") for line in lines)]


ROWS = rows((ROOT / "SECURITY.md").read_text(encoding="utf-8"))


def test_there_are_sentences() -> None:
    assert len(ROWS) > 20 and all(sentence.endswith(".") for sentence, _ in ROWS)
    assert len({sentence for sentence, _ in ROWS}) == len(ROWS)


def missing_tests(tests: str) -> list[str]:
    """What is named as a test of a sentence and is none."""
    found = REFERENCE.findall(tests)
    rest = REFERENCE.sub("", tests).replace(",", "").strip()
    missing = [rest] if rest or not found else []
    for folder, file, name in found:
        path = ROOT / FOLDERS[folder] / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{folder}{file}::{name}")
    return missing


@pytest.mark.parametrize(("sentence", "tests"), ROWS, ids=range(len(ROWS)))
def test_a_sentence_has_its_tests(sentence: str, tests: str) -> None:
    assert not missing_tests(tests), sentence


@pytest.mark.parametrize(
    "tests",
    ["", "somewhere", "`test_security.py::test_none`", "`test_none.py::test_x`", "`test_security.py::test_there_are_sentences` and"],
)
def test_a_sentence_without_a_test_is_found(tests: str) -> None:
    assert missing_tests(tests)


def test_the_readme_leads_here() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
