"""Draws which folder of the package imports which, at any revision: `python scripts/draw_imports.py
[REVISION]`.

In: the sources of `rannc_backend`, `passes` and `kernels`, from the work tree or from a git revision. Out: a
Mermaid diagram, a text diagram, or the numbers as JSON. Nodes are folders, the root of the package among
them. Imports in functions and for type checkers count, those of the root's `__init__` do not: its names load
on use. Layers come from the graph alone: folders that import each other in a cycle are one component, and a
component lies one layer above the highest one that it imports. An import between two folders of one component
is not downward; the numbers call it upward.

`--page docs/architecture.md` rewrites the part of the page between its two markers.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "passes", "rannc_backend")
PACKAGE = "rannc_backend"
BEFORE = ROOT / "docs/benchmarks/imports_e1ecec7.json"
MARKERS = ("<!-- imports: written by scripts/draw_imports.py -->", "<!-- imports: end -->")
LIMITS = {
    "folders": "30 and 4",
    "upward dependencies": "0",
    "modules at the root": "8",
    "modules in the largest folder": "14",
}


def sources(revision: str = "", root: Path = ROOT) -> dict[str, str]:
    """Path to text of every Python file of the package, in the work tree or at a git revision."""
    if not revision:
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    command = ["git", "-C", str(root), "archive", revision, *PACKAGES]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[member.name] = file.read().decode("utf-8")
    return found


def module_of(path: str) -> str:
    """Dotted name of a file as the package is installed: passes/ and kernels/ lie inside of it."""
    parts = path.removesuffix(".py").split("/")
    parts = parts if parts[0] == PACKAGE else [PACKAGE, *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_imports(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Modules of the package that each of its modules imports."""
    names = {module_of(path) for path in files}
    found: dict[str, set[str]] = {}
    for path, text in files.items():
        module, imported = module_of(path), set()
        for node in ast.walk(ast.parse(text, filename=path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in names else node.module for each in full}
        found[module] = (imported & names) - {module}
    return found


def folder_graph(files: Mapping[str, str]) -> nx.DiGraph:
    """Folders as nodes, named without the package; an edge is an import of a module of one by one of
    another.
    """
    folders = {module_of(path) for path in files if path.endswith("/__init__.py")}

    def folder(module: str) -> str:
        parent = module if module in folders else module.rpartition(".")[0]
        return parent.removeprefix(f"{PACKAGE}.")

    graph = nx.DiGraph()
    for module, others in module_imports(files).items():
        graph.add_node(folder(module))
        graph.add_edges_from((folder(module), folder(other)) for other in others if other != PACKAGE)
    graph.remove_edges_from([edge for edge in graph.edges if edge[0] == edge[1]])
    return graph


def layers_of(graph: nx.DiGraph) -> dict[str, int]:
    """Layer of each folder, counted from 0 at the bottom."""
    components = nx.condensation(graph)
    height: dict[int, int] = {}
    for component in reversed(list(nx.topological_sort(components))):
        height[component] = 1 + max((height[below] for below in components[component]), default=-1)
    return {
        folder: height[component]
        for component, folders in components.nodes(data="members")
        for folder in folders
    }


def numbers(files: Mapping[str, str]) -> dict[str, int]:
    """What the table of docs/architecture.md says about a revision."""
    graph = folder_graph(files)
    layers = layers_of(graph)
    counts = Counter(path.rpartition("/")[0] for path in files if not path.endswith("/__init__.py"))
    return {
        "modules": sum(counts.values()),
        "folders": len({path.rpartition("/")[0] for path in files}),
        "layers": 1 + max(layers.values(), default=-1),
        "dependencies between folders": graph.number_of_edges(),
        "upward dependencies": sum(layers[one] <= layers[other] for one, other in graph.edges),
        "modules at the root": counts[PACKAGE],
        "modules in the largest folder": max(counts.values(), default=0),
    }


def shown_edges(graph: nx.DiGraph) -> list[tuple[str, str]]:
    """The edges that a drawing needs: without those that follow from others. All of them where there are
    cycles.
    """
    is_acyclic = nx.is_directed_acyclic_graph(graph)
    return sorted((nx.transitive_reduction(graph) if is_acyclic else graph).edges)


def by_layer(graph: nx.DiGraph) -> list[tuple[int, list[str]]]:
    """Layers from the top, each with its folders in order."""
    layers = layers_of(graph)
    return [
        (layer, sorted(folder for folder in layers if layers[folder] == layer))
        for layer in sorted(set(layers.values()), reverse=True)
    ]


def mermaid(graph: nx.DiGraph) -> str:
    """A flowchart from the top layer to the bottom; an edge that is not downward is drawn thick."""
    layers = layers_of(graph)
    lines = ["flowchart TB"]
    for layer, folders in by_layer(graph):
        nodes = "; ".join(f'{_node(folder)}["{folder.replace(".", "/")}"]' for folder in folders)
        lines += [f'  subgraph layer{layer}["layer {layer}"]', f"    {nodes}", "  end"]
    for one, other in shown_edges(graph):
        arrow = "-->" if layers[one] > layers[other] else "==>"
        lines.append(f"  {_node(one)} {arrow} {_node(other)}")
    return "\n".join(lines)


def _node(folder: str) -> str:
    # A prefix: words such as `end` and `graph` mean something to Mermaid.
    return f"n_{folder.replace('.', '_')}"


def text(graph: nx.DiGraph) -> str:
    """A line per folder: its layer, and what it imports."""
    layers = layers_of(graph)
    lines = []
    for layer, folders in by_layer(graph):
        for folder in folders:
            marked = [
                f"{other}{'' if layers[other] < layer else ' (upward)'}" for other in sorted(graph[folder])
            ]
            lines.append(f"{layer:>2}  {folder}: {', '.join(marked) or 'nothing'}")
    return "\n".join(lines)


def section(files: Mapping[str, str], before: Mapping[str, int]) -> str:
    """The part of docs/architecture.md between the markers: the diagram of today and the numbers beside
    e1ecec7.
    """
    now = numbers(files)
    rows = "\n".join(f"| {name} | {before[name]} | {now[name]} | {LIMITS.get(name, '')} |" for name in now)
    return (
        f"```mermaid\n{mermaid(folder_graph(files))}\n```\n\n"
        f"| | before (e1ecec7) | now | limit |\n|---|---|---|---|\n{rows}\n"
    )


def page_with(page: str, part: str) -> str:
    """A page with the part between its markers replaced."""
    begin, end = (page.index(marker) for marker in MARKERS)
    return f"{page[:begin]}{MARKERS[0]}\n{part}{page[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", default="", help="a git revision; default: the work tree")
    parser.add_argument("--format", choices=("mermaid", "text", "json"), default="text")
    parser.add_argument("--page", type=Path, help="rewrite the marked part of this page")
    arguments = parser.parse_args()
    files = sources(arguments.revision)
    if arguments.page is not None:
        part = section(files, json.loads(BEFORE.read_text(encoding="utf-8")))
        page = arguments.page.read_text(encoding="utf-8")
        arguments.page.write_text(page_with(page, part), encoding="utf-8")
    elif arguments.format == "json":
        print(json.dumps(numbers(files), indent=1))
    else:
        draw = mermaid if arguments.format == "mermaid" else text
        figures = "\n".join(f"{name}: {value}" for name, value in numbers(files).items())
        comment = "%% " if arguments.format == "mermaid" else ""
        print(draw(folder_graph(files)))
        print("\n".join(comment + line for line in figures.splitlines()))


if __name__ == "__main__":
    main()
