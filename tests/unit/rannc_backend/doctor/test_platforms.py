"""What is supported is said once: by the doctor, README.md and pyproject.toml alike; programs of PATH are
looked at one by one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rannc_backend.doctor import mpi, platforms
from rannc_backend.settings.torch_version import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parents[4]


def test_the_bounds_of_torch_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"' in text
    oldest, newest = platforms.OLDEST_PYTHON, platforms.NEWEST_PYTHON
    assert f'requires-python = ">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"' in text
    versions = [(3, minor) for minor in range(oldest[1], newest[1] + 1)]
    assert re.findall(r"Python :: (3\.\d+)", text) == [f"{major}.{minor}" for major, minor in versions]


def test_the_readme_says_what_is_supported() -> None:
    install = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Install\n")[1].split("\n## ")[0]
    assert platforms.SUPPORTED_PLATFORMS in install


def program(folder: Path, name: str, says: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_several_launchers_in_path(tmp_path: Path) -> None:
    first = program(tmp_path / "a", "mpirun", "HYDRA build details:\n  Version: 5.0.2")
    (tmp_path / "a" / "mpiexec").symlink_to(first)
    second = program(tmp_path / "b", "mpirun", "mpirun (Open MPI) 5.0.11")
    path = os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "missing"), str(tmp_path / "b"), "/bin"])
    assert mpi.launchers_in(path)[:2] == [first, second]
    found = {finding.name: finding for finding in mpi.find_mpi({"PATH": path})}
    assert found["MPI launchers"].status == "warning"
    assert f"of 2 kinds: {first} (Hydra 5.0.2), {second} (Open MPI 5.0.11)" in found["MPI launchers"].text
    assert first in found["MPI"].text
    alone = list(mpi.find_mpi({"PATH": str(tmp_path / "missing")}))
    assert [finding.status for finding in alone] == ["warning"] and "torchrun" in alone[0].text


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    """In a process of its own, through the command, which must itself do without torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open')", encoding="utf-8"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "rannc_backend.cli.main", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert result.returncode == 1, result.stderr
    assert "libcudart.so.12" in result.stdout and "problem torch:" in result.stdout, result.stdout
    assert "two ranks" not in result.stdout
