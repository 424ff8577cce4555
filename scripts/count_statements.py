"""Statements of the product, by folder: how much code there is, however it is laid out in lines.

    python -m scripts.count_statements [REVISION [REVISION]]

Counted are nodes of statement kind in the syntax tree, docstrings apart. Without a revision the working tree
is counted; with two, they stand side by side, and modules that only the second has are listed apart with
their counts. A module that was moved or renamed is the one that git finds most of its lines in.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "passes", "rannc_backend")
WORKING_TREE = "working tree"


def statements(source: str) -> int:
    """Nodes of statement kind, docstrings apart."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(isinstance(node, documented) and ast.get_docstring(node) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout


def counts_of(revision: str) -> dict[str, int]:
    """Statements of each module of the product, by its path."""
    if revision == WORKING_TREE:
        paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
        return {path.relative_to(ROOT).as_posix(): statements(path.read_text("utf-8")) for path in paths}
    listed = git("ls-tree", "-r", "--name-only", revision, "--", *PACKAGES).splitlines()
    return {path: statements(git("show", f"{revision}:{path}")) for path in listed if path.endswith(".py")}


def by_folder(counts: Mapping[str, int]) -> dict[str, int]:
    """Sums by folder, each with its own modules only."""
    sums: Counter[str] = Counter()
    for path, count in counts.items():
        sums[str(PurePosixPath(path).parent)] += count
    return dict(sorted(sums.items()))


def added(first: str, second: str) -> list[str]:
    """Modules that only ``second`` has, moved and renamed ones apart."""
    only = ("--name-only", "--diff-filter=A", "--find-renames=30%", "-l0")
    paths = git("diff", *only, first, second, "--", *PACKAGES).splitlines()
    return sorted(path for path in paths if path.endswith(".py"))


def table(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Lines: a row for each folder, a column for each of the revisions."""
    columns = [by_folder(each) for each in counts.values()]
    folders = sorted(set().union(*columns))
    columns = [{**column, "together": sum(column.values())} for column in columns]
    width = max(map(len, [*folders, "together"]))
    lines = [" " * width + "".join(f"  {name[:12]:>12}" for name in counts)]
    for folder in (*folders, "together"):
        lines.append(f"{folder:{width}}" + "".join(f"  {column.get(folder, 0):12}" for column in columns))
    return lines


def comparison(before: Mapping[str, int], after: Mapping[str, int], new: Sequence[str]) -> list[str]:
    """Lines: what changed, and the modules that are new."""
    first, second, apart = sum(before.values()), sum(after.values()), sum(after[path] for path in new)
    return [
        f"changed by {second - first:+} ({(second - first) / first:+.1%})",
        f"{apart} in {len(new)} modules that only the second has; changed by {second - apart - first:+} "
        "apart from them",
        *(f"  {path}: {after[path]}" for path in new),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION")
    revisions = parser.parse_args().revisions or [WORKING_TREE]
    if len(revisions) > 2:
        parser.error("at most two revisions")
    counts = {revision: counts_of(revision) for revision in revisions}
    lines = table(counts)
    if len(revisions) == 2:
        lines += ["", *comparison(*counts.values(), added(*revisions))]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
