"""What a GPU machine needs can be seen without one: its list of packages, and benchmarks that run through on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.profile_gpu import shares
from tests.gpu.conftest import missing_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ("step_gpu", "backward_gpu", "profile_gpu")


def test_the_list_has_all_that_the_package_needs() -> None:
    listed = {re.match(r"[\w.-]+", line)[0] for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if line and line[0] != "#"}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", text)[0] for text in needed if "python_version" not in text}
    assert names <= listed, names - listed


def test_missing_packages_are_named() -> None:
    assert missing_packages("# comment\nsympy>=1.13\nno-such-package-at-all>=3  # why\n\nnumpy\n") == ["no-such-package-at-all"]


def test_shares_of_a_step() -> None:
    events = [("gemm", 0.0, 4.0), ("Memcpy DtoD", 3.0, 5.0), ("triton_poi_fused__to_copy", 6.0, 7.0), ("gemm", 8.0, 10.0)]
    found = shares(events)
    assert found["kernels"] == pytest.approx(0.7) and found["copies"] == pytest.approx(0.2) and found["gaps"] == pytest.approx(0.2)
    assert found["longest"][0] == ["gemm", pytest.approx(0.6)]


@pytest.mark.full
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_benchmarks_run_through(benchmark: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / f"{benchmark}.py"), "--tiny", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=540, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines and all({"benchmark", "date", "torch", "triton", "device"} <= set(line) for line in lines)
    assert all(line["ratio"] > 0 for line in lines if "ratio" in line)
