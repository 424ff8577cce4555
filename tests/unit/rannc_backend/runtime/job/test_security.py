"""Every sentence of the tables in SECURITY.md and docs/reliability.md has tests, and they are there."""

from __future__ import annotations

import pytest

from tests.sentences import ROOT, missing_tests, rows

SECURITY = rows((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
RELIABILITY = rows((ROOT / "docs/reliability.md").read_text(encoding="utf-8"))


def test_there_are_sentences() -> None:
    assert len(SECURITY) > 20 and len(RELIABILITY) > 20
    sentences = [row[0] for row in SECURITY + RELIABILITY]
    assert all(sentence.endswith(".") for sentence in sentences) and len(set(sentences)) == len(sentences)


@pytest.mark.parametrize("row", SECURITY + RELIABILITY, ids=lambda row: row[0][:60])
def test_a_sentence_has_its_tests(row: list[str]) -> None:
    assert not missing_tests(row[1]), row[0]


@pytest.mark.parametrize(
    "tests",
    [
        *(
            "",
            "somewhere",
            "`test_security.py::test_none`",
            "`test_none.py::test_x`",
            "`test_security.py::test_there_are_sentences` and",
        ),
        *("`test_none.py`", "`test_monitor.py::test_a_goodbye_has_a_limit[nowhere_at_all]`"),
    ],
)
def test_a_sentence_without_a_test_is_found(tests: str) -> None:
    assert missing_tests(tests)


def test_the_readme_leads_here() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
