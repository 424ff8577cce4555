"""Tables of documents that name the tests of a sentence: `test_x.py::test_y[case]`, or a whole file, of unit
or distributed tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"": "tests/unit/rannc_backend", "distributed ": "tests/distributed"}
REFERENCE = re.compile(r"(distributed )?`((?:\w+/)*test_\w+\.py)(?:::(test_\w+)(?:\[([^\]`]+)\])?)?`")


def rows(text: str) -> list[list[str]]:
    """Cells of all tables whose first two columns are "what holds" and "test"."""
    found: list[list[str]] = []
    is_ours = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_ours = False
        elif cells[:2] == ["what holds", "test"]:
            is_ours = True
        elif is_ours and set("".join(cells)) != {"-"}:
            found.append(cells)
    return found


def missing_tests(tests: str) -> list[str]:
    """What is named as a test of a sentence and is none."""
    found = REFERENCE.findall(tests)
    rest = REFERENCE.sub("", tests).replace(",", "").strip()
    missing = [rest] if rest or not found else []
    for folder, file, name, case in found:
        path = ROOT / FOLDERS[folder] / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        if not text or (name and name not in names) or (case and not is_case(case, text)):
            missing.append(f"{folder}{file}::{name}[{case}]")
    return missing


def is_case(case: str, text: str) -> bool:
    """Whether each word of a case's name is in its file, or in the checks that it takes its cases from."""
    texts = [text] + [
        (ROOT / "tests/distributed" / f"{module}.py").read_text(encoding="utf-8")
        for module in re.findall(r"from tests\.distributed\.(\w+_checks) import", text)
    ]
    return all(any(word in each for each in texts) for word in re.findall(r"[A-Za-z_]{3,}", case))
