"""The shape of the package, kept by machine: layers, folders, sizes, and who may touch torch.distributed and
torch's private parts.

Raising a limit or widening a list here is a decision; docs/architecture.md gives the reasons.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import networkx as nx
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "passes", "rannc_backend")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_TEST_FILE_LINES = 800
# Of the layout that was drawn; and what has places of its own beside it: the doors for users of other systems, and the
# second way of capture.
MAX_FOLDERS = 30
FOLDERS_BESIDE = {"autodist", "epl", "integrations", "nonstrict"}
MAX_ROOT_MODULES = 8
MAX_FOLDER_MODULES = 14
# Without a cache, on two cores that others use too; with one it takes seconds.
MYPY_SECONDS = 900

DISTRIBUTED_FILES = (
    "rannc_backend/runtime/job/make_transport.py",
    "rannc_backend/runtime/comm/gloo.py",
    "rannc_backend/runtime/comm/nccl.py",
    "rannc_backend/runtime/job/bootstrap.py",
    # Stores only.
    "rannc_backend/runtime/job/meeting.py",
    # torch.distributed.checkpoint only: no collectives.
    "rannc_backend/checkpoint/tensor_storage.py",
    "rannc_backend/integrations/distributed_checkpoint.py",
    "rannc_backend/integrations/dcp_reader.py",
)
PRIVATE_TORCH_FILES = ("passes/plain_numbers.py", "rannc_backend/runtime/torch_internals.py")
PRIVATE_TORCH_PREFIXES = ("rannc_backend/capture/", "rannc_backend/stages/")
PRIVATE_TORCH_IN_PASSES = ("torch._ops", "torch._decomp", "torch._dispatch")
# Longest import of the package alone, seconds; torch is what takes time, and it must not be imported.
LEAN_IMPORT_SECONDS = 2.0


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module or name, and every attribute chain that starts at a plain name, with its line."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            part: ast.expr = node
            while isinstance(part, ast.Attribute):
                inner.add(id(part))
                parts.append(part.attr)
                part = part.value
            if isinstance(part, ast.Name):
                yield ".".join([part.id, *reversed(parts)]), node.lineno


def uses_distributed(dotted: str) -> bool:
    return dotted == "torch.distributed" or dotted.startswith("torch.distributed.")


def uses_private_torch(dotted: str) -> bool:
    """torch._dynamo.x, torch.fx._y; but not torch.add_ nor torch.__version__."""
    first, *rest = dotted.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def uses_folder_name(dotted: str) -> bool:
    """kernels.x or passes.y: they are rannc_backend.kernels and rannc_backend.passes to everyone."""
    return dotted.split(".")[0] in ("kernels", "passes") and "." in dotted


def findings(paths: list[Path], wrong: Callable[[str], bool]) -> list[str]:
    return [
        f"{name(path)}:{line}: {dotted}"
        for path in paths
        for dotted, line in dotted_names(tree_of(path))
        if wrong(dotted)
    ]


@pytest.fixture(scope="module")
def installed_layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three packages in one tree, as an installation has them."""
    folder = tmp_path_factory.mktemp("layout")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rannc_backend", folder / "rannc_backend", ignore=skipped)
    for package in ("passes", "kernels"):
        shutil.copytree(ROOT / package, folder / "rannc_backend" / package, ignore=skipped)
    return folder


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(contracts, encoding="utf-8")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--config", "pyproject.toml", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_imports_go_only_downward(installed_layout: Path) -> None:
    result = lint_imports(installed_layout)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors/__init__.py", "import rannc_backend.settings.options"),
        ("passes/pipeline.py", "import rannc_backend.errors"),
        ("kernels/__init__.py", "import rannc_backend.passes.pipeline"),
        ("runtime/__init__.py", "import rannc_backend.schedule"),
        ("stages/compiled_stage.py", "import rannc_backend.runtime.world"),
        ("runtime/comm/gloo.py", "import rannc_backend.runtime.step.executor"),
        ("planner/cost/pricing.py", "import rannc_backend.planner.search.bounds"),
        ("passes/batch/batch_axis.py", "import rannc_backend.passes.stage.split_stages"),
        ("ir/plan.py", "import torch"),
        ("unheard_of.py", ""),
    ],
)
def test_a_planted_import_is_found(installed_layout: Path, tmp_path: Path, module: str, line: str) -> None:
    shutil.copytree(installed_layout, tmp_path / "planted")
    path = tmp_path / "planted" / "rannc_backend" / module
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{text}\n{line}\n", encoding="utf-8")
    assert lint_imports(tmp_path / "planted").returncode != 0


def modules() -> dict[str, Path]:
    """Every module of the package as it is installed, by its dotted name."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "rannc_backend" else ("rannc_backend", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def module_imports() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, in functions and for type checkers too."""
    names = modules()
    found: dict[str, set[str]] = {}
    for module, path in names.items():
        imported: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in names else node.module for each in full}
        found[module] = (imported & set(names)) - {module}
    return found


def folder_imports() -> nx.DiGraph:
    """Folders and the modules of the root as nodes, imports as edges."""
    names = modules()

    def folder(module: str) -> str:
        parent = module if names[module].name == "__init__.py" else module.rpartition(".")[0]
        return module if parent == "rannc_backend" else parent

    return nx.DiGraph(
        (folder(module), folder(other))
        for module, others in module_imports().items()
        for other in others
        if folder(module) != folder(other)
    )


def test_no_module_and_no_folder_is_in_a_cycle() -> None:
    graph = nx.DiGraph((module, other) for module, others in module_imports().items() for other in others)
    for each in (graph, folder_imports()):
        cycles = [sorted(part) for part in nx.strongly_connected_components(each) if len(part) > 1]
        assert not cycles, "\n".join(map(str, cycles))


def test_folders_are_small_and_few() -> None:
    counts = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    limits = {ROOT / "rannc_backend": MAX_ROOT_MODULES}
    too_full = [
        f"{name(folder)}: {count} modules"
        for folder, count in counts.items()
        if count > limits.get(folder, MAX_FOLDER_MODULES)
    ]
    assert not too_full, "\n".join(too_full)
    beside = {folder for folder in counts if folder.name in FOLDERS_BESIDE}
    assert len(beside) == len(FOLDERS_BESIDE) and len(counts) - len(beside) <= MAX_FOLDERS


def test_every_folder_says_what_it_is_for() -> None:
    silent = [
        name(path) for path in SOURCES if path.name == "__init__.py" and not ast.get_docstring(tree_of(path))
    ]
    assert not silent, "\n".join(silent)


def test_every_folder_is_installed() -> None:
    """An editable install finds folders that a wheel would lack."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py"
    }
    names = {
        folder if folder.startswith("rannc_backend") else f"rannc_backend.{folder}" for folder in folders
    }
    assert sorted(listed) == sorted(names) and len(listed) == len(set(listed))


def test_imports_are_absolute() -> None:
    found = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES + TESTS + EXAMPLES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not found, "\n".join(found)


def test_ruff_finds_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(MYPY_SECONDS)
def test_mypy_finds_nothing() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_types.py")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_passes_over_nothing() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert not [entry for entry in settings["tool"]["mypy"]["overrides"] if entry.get("ignore_errors")]


def test_files_are_short() -> None:
    limits = [(path, MAX_FILE_LINES) for path in SOURCES + EXAMPLES] + [
        (path, MAX_TEST_FILE_LINES) for path in TESTS
    ]
    too_long = [
        f"{name(path)}: {num_lines} lines, at most {limit}"
        for path, limit in limits
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > limit
    ]
    assert not too_long, "\n".join(too_long)


def test_functions_are_short() -> None:
    too_long = [
        f"{name(path)}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
        for path in SOURCES + EXAMPLES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (num_lines := (node.end_lineno or node.lineno) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not too_long, "\n".join(too_long)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name(path)
        for path in SOURCES + EXAMPLES
        if path.name != "__init__.py" and not ast.get_docstring(tree_of(path))
    ]
    assert not silent, "\n".join(silent)


def test_torch_distributed_stays_in_transport_and_bootstrap() -> None:
    outside = [path for path in SOURCES if name(path) not in DISTRIBUTED_FILES]
    found = findings(outside, uses_distributed)
    assert not found, "\n".join(found)


def test_folders_are_imported_under_the_package() -> None:
    imports = [
        (path, node)
        for path in SOURCES + TESTS + EXAMPLES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    found = [
        f"{name(path)}:{node.lineno}"
        for path, node in imports
        if any(uses_folder_name(f"{n}.") for n, _ in dotted_names(node))
    ]
    assert not found, "\n".join(found)


def test_private_torch_stays_behind_its_adapters() -> None:
    def wrong(path: Path, dotted: str) -> bool:
        allowed = PRIVATE_TORCH_IN_PASSES if name(path).startswith("passes/") else ()
        return uses_private_torch(dotted) and not dotted.startswith(allowed)

    outside = [
        path
        for path in SOURCES
        if name(path) not in PRIVATE_TORCH_FILES and not name(path).startswith(PRIVATE_TORCH_PREFIXES)
    ]
    found = [
        line for path in outside for line in findings([path], lambda dotted, path=path: wrong(path, dotted))
    ]
    assert not found, "\n".join(found)


def test_no_hidden_state_and_no_print() -> None:
    # ruff has the first two as well; the third is ours.
    found = []
    for path in SOURCES:
        tree = tree_of(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.append(f"{name(path)}:{node.lineno}: global {', '.join(node.names)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{name(path)}:{node.lineno}: print")
        for node in tree.body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if _is_empty_container(value):
                found.append(
                    f"{name(path)}:{node.lineno}: an empty container at module level is there to be filled"
                )
    assert not found, "\n".join(found)


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, (ast.List, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in {"dict", "list", "set", "defaultdict", "WeakKeyDictionary", "deque"}
        and not value.args
    )


@pytest.mark.parametrize(
    ("source", "check", "found"),
    [
        ("import torch.distributed as dist", uses_distributed, True),
        ("from torch import distributed", uses_distributed, True),
        ("import torch\nx = torch.distributed.get_rank()", uses_distributed, True),
        ("import torch\nx = torch.distributions.Normal", uses_distributed, False),
        ("from torch._dynamo import config", uses_private_torch, True),
        ("import torch._inductor.compile_fx", uses_private_torch, True),
        ("from torch.fx._compat import x", uses_private_torch, True),
        ("import torch\ntorch._C._x()", uses_private_torch, True),
        ("import torch\ntorch.ops.aten.add_.Tensor(1)", uses_private_torch, False),
        ("from torch.fx.experimental.symbolic_shapes import ShapeEnv", uses_private_torch, False),
    ],
)
def test_the_checks_see_what_they_look_for(source: str, check: Callable[[str], bool], found: bool) -> None:
    assert any(check(dotted) for dotted, _ in dotted_names(ast.parse(source))) is found


def test_importing_the_package_is_lean() -> None:
    code = (
        "import sys, rannc_backend\n"
        "heavy = {'torch', 'mpi4py', 'transformers', 'sympy', 'networkx', 'pydantic', 'typer'} & "
        "set(sys.modules)\nassert not heavy, heavy\n"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - start
    assert result.returncode == 0, result.stderr
    assert seconds < LEAN_IMPORT_SECONDS, f"import rannc_backend took {seconds:.2f} s"


def test_importing_the_backend_starts_nothing() -> None:
    pytest.importorskip("rannc_backend.backend")
    code = (
        "import sys, rannc_backend.backend\n"
        "heavy = {'mpi4py.MPI', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_torch_compile_finds_the_backend_by_name() -> None:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    assert {point.name: point.value for point in points}.get("rannc") == "rannc_backend.backend:rannc"


def test_every_trace_names_its_decompositions() -> None:
    """Without a table, torch from 2.14 on makes `alias` of `detach`, and gradients go on where the model
    stops them.
    """
    calls = [
        (path.name, node)
        for folder in ("rannc_backend", "passes")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "make_fx"
    ]
    assert len(calls) >= 4
    assert not [
        name for name, call in calls if "decomposition_table" not in {word.arg for word in call.keywords}
    ]
