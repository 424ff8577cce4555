"""The counter of statements."""

from __future__ import annotations

from scripts.count_statements import WORKING_TREE, comparison, counts_of, statements, table


def test_docstrings_and_layout_do_not_count() -> None:
    source = '"""What it is."""\n\nx = (\n    1,\n)\ndef f():\n    """Two."""\n    if x:\n        return 1; "text"\n'
    assert statements(source) == 5  # x, f, if, return, a text that is no docstring
    assert statements("") == 0


def test_sums_by_folder_side_by_side() -> None:
    before, after = {"a/one.py": 10}, {"a/one.py": 8, "a/b/new.py": 5}
    assert [line.split() for line in table({"before": before, "after": after})] == [
        ["before", "after"],
        ["a", "10", "8"],
        ["a/b", "0", "5"],
        ["together", "10", "13"],
    ]
    assert comparison(before, after, ["a/b/new.py"]) == [
        "changed by +3 (+30.0%)",
        "5 in 1 modules that only the second has; changed by -2 apart from them",
        "  a/b/new.py: 5",
    ]


def test_the_product_is_counted() -> None:
    counts = counts_of(WORKING_TREE)
    assert counts["rannc_backend/__init__.py"] > 0 and counts["kernels/__init__.py"] >= 0
    assert {path.split("/")[0] for path in counts} == {"kernels", "passes", "rannc_backend"}
