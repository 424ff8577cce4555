"""What a GPU machine needs can be seen without one: its list of packages, and benchmarks that run through on
a CPU.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import all_gpu
from tests.benchmarks.all_gpu import benchmarks
from tests.benchmarks.profile_gpu import shares
from tests.distributed.harness.launch import run_script
from tests.gpu.conftest import missing_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ("step_gpu", "backward_gpu", "profile_gpu")


def test_the_list_has_all_that_the_package_needs() -> None:
    listed = {
        re.match(r"[\w.-]+", line)[0]
        for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()
        if line and line[0] != "#"
    }
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", text)[0] for text in needed if "python_version" not in text}
    assert names <= listed, names - listed


def test_the_list_has_all_that_its_tests_and_benchmarks_import() -> None:
    listed = {
        re.match(r"[\w.-]+", line)[0]
        for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()
        if line and line[0] != "#"
    }
    files = [ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "gpu").glob("*.py"), *benchmarks()]
    needed = {_PACKAGES.get(name, name) for name in imported(files)}
    assert {"torch", "pytest", "pytest-xdist"} <= needed and needed <= listed, needed - listed


_PACKAGES = {"annotated_types": "annotated-types", "xdist": "pytest-xdist", "pydantic_core": "pydantic"}


def imported(files: list[Path]) -> set[str]:
    """Other people's packages that these files import when they are imported, or others of this repository
    that they import.
    """
    seen: set[Path] = set()
    found: set[str] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                if parts[:2] in (["rannc_backend", "kernels"], ["rannc_backend", "passes"]):
                    parts = parts[1:]
                places = [base.joinpath(*parts) for base in (ROOT, file.parent)]
                own = [
                    path
                    for place in places
                    for path in (place.with_suffix(".py"), place / "__init__.py")
                    if path.exists()
                ]
                waiting += own
                ours = any(
                    (base / parts[0]).is_dir() or (base / f"{parts[0]}.py").exists()
                    for base in (ROOT, file.parent)
                )
                if not ours and parts[0] not in sys.stdlib_module_names:
                    found.add(parts[0])
    return found


def without_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_without_a_device_the_tests_of_a_gpu_fail_in_a_line() -> None:
    result = without_gpu("pytest", "tests/gpu", "--require-gpu", "-q", "-p", "no:cacheprovider")
    assert result.returncode == 2
    lines = [
        line
        for line in (result.stdout + result.stderr).splitlines()
        if "no CUDA device for the tests on a GPU: " in line
    ]
    assert len(lines) == 1, result.stdout + result.stderr


@pytest.mark.parametrize(("body", "fails"), [("pass", False), ("pytest.skip('why not')", True)])
def test_where_a_gpu_is_required_nothing_is_passed_over(tmp_path: Path, body: str, fails: bool) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption\nfrom tests.gpu.conftest import pytest_sessionfinish\n",
        encoding="utf-8",
    )
    (tmp_path / "test_it.py").write_text(
        f"import pytest\ndef test_a():\n    pass\ndef test_b():\n    {body}\n", encoding="utf-8"
    )
    arguments = (
        "pytest",
        str(tmp_path),
        "--require-gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    )
    result = without_gpu(*arguments)
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    assert ("every chosen test must run and pass" in result.stdout) == fails
    if not fails:
        assert without_gpu(*arguments, "-k", "no_such_test").returncode != 0


def test_a_benchmark_that_fails_is_named_after_all_have_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "a_gpu": "raise SystemExit(3)",
        "b_gpu": "print('{}')",
        "c_gpu": "pass",
        "host_cost": "print(1)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    files = all_gpu.benchmarks(tmp_path)
    assert [file.name for file in files] == ["a_gpu.py", "b_gpu.py", "c_gpu.py", "host_cost.py"]
    assert all_gpu.run_all(files, []) == ["a_gpu.py (exit code 3)", "c_gpu.py (printed nothing)"]
    assert capfd.readouterr().out.split() == ["{}", "1"]
    assert {file.stem for file in benchmarks()} == {*BENCHMARKS, "kernels_gpu", "host_cost"}


def test_without_a_device_the_benchmarks_fail_in_a_line() -> None:
    result = without_gpu("tests.benchmarks.all_gpu")
    assert (
        result.returncode == 2
        and len(result.stderr.splitlines()) == 1
        and "no CUDA device here" in result.stderr
    )


@pytest.mark.full
@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
def test_the_ranks_of_the_tests_on_a_gpu_do_the_right_thing_over_gloo(
    tmp_path: Path, stage_compiler: str
) -> None:
    worker = ROOT / "tests" / "gpu" / "rank_worker.py"
    code, output, _ = run_script(
        worker,
        (
            "cpu",
            stage_compiler,
            "equal:1,1",
            "wires:2",
            "zero:2",
            "offload:1,1",
            "parts:1,1",
            "lanes:1,1,1,1",
        ),
        world=2,
        directory=tmp_path,
        limit_seconds=300.0,
    )
    assert code == 0 and sorted(re.findall(r"\bok (\d)", output)) == ["0", "1"], output[-3000:]


def test_missing_packages_are_named() -> None:
    assert missing_packages("# comment\nsympy>=1.13\nno-such-package-at-all>=3  # why\n\nnumpy\n") == [
        "no-such-package-at-all"
    ]
    # For a Python that is not this one.
    assert missing_packages('no-such-package-at-all>=3; python_version < "3"\n') == []


def test_shares_of_a_step() -> None:
    events = [
        ("gemm", 0.0, 4.0),
        ("Memcpy DtoD", 3.0, 5.0),
        ("triton_poi_fused__to_copy", 6.0, 7.0),
        ("gemm", 8.0, 10.0),
    ]
    found = shares(events)
    assert (
        found["kernels"] == pytest.approx(0.7)
        and found["copies"] == pytest.approx(0.2)
        and found["gaps"] == pytest.approx(0.2)
    )
    assert found["longest"][0] == ["gemm", pytest.approx(0.6)]


@pytest.mark.full
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_benchmarks_run_through(benchmark: str) -> None:
    command = [
        sys.executable,
        str(ROOT / "tests" / "benchmarks" / f"{benchmark}.py"),
        "--tiny",
        "--device",
        "cpu",
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=540, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines and all({"benchmark", "date", "torch", "triton", "device"} <= set(line) for line in lines)
    assert all(line["ratio"] > 0 for line in lines if "ratio" in line)
