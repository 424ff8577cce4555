"""A copy of the package as it is installed, with the tests beside, in which a fault may be.

In: the repository. Out: `Tree`: a folder whose name in PYTHONPATH makes every process, ranks included, import
the copy. The repository itself is never changed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted_faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rannc_backend"
# Folders beside the package that are installed within it.
WITHIN = ("passes", "kernels")
BESIDE = ("tests", "docs", "examples", "scripts", "pyproject.toml", "README.md", "Makefile")
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
# A .pyc is taken for that of its source if size and second of the last change agree, and a fault may keep the
# size.
_FIRST_SECOND = 1_000_000_000
# Of one test without ranks, which have limits of their own: one that hangs has noticed something.
TEST_LIMIT_SECONDS = 100
# Exit codes of pytest: some tests failed; it could not go on, as with an import that fails; no test was chosen.
FAILED, INTERRUPTED, NOT_FOUND, NONE_CHOSEN = 1, 2, 4, 5


def repository_file(path: str) -> Path:
    """A file of the installed package, where the repository has it."""
    return ROOT / path if path.split("/")[0] in WITHIN else ROOT / PACKAGE / path


def digest() -> str:
    """Of everything that a run depends on."""
    state = hashlib.sha256(f"{sys.version}".encode())
    for folder in (ROOT / PACKAGE, *(ROOT / name for name in (*WITHIN, *BESIDE))):
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            # What is planted, and with which tests, is part of each fault's own key.
            if path.is_file() and "__pycache__" not in path.parts and "planted_faults" not in path.parts:
                state.update(f"{path.relative_to(ROOT)}\0".encode())
                state.update(path.read_bytes())
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class Run:
    """How one pytest ended: its exit code (None: it was ended after the limit), its output, and the seconds
    it took.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """Its last lines, in one."""
        return " / ".join(self.output.strip().splitlines()[-3:])[-400:]


class Tree:
    """One copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seconds = itertools.count(_FIRST_SECOND, 10)
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=_SKIPPED)
        for name in WITHIN:
            shutil.copytree(ROOT / name, folder / PACKAGE / name, ignore=_SKIPPED)
        for name in BESIDE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=_SKIPPED)
            elif source.exists():
                shutil.copy2(source, folder / name)

    def plant(self, fault: Fault) -> None:
        """Put it in.

        Raises:
            StaleFault: it does not fit the source.
        """
        self._write(fault.path, fault.applied(repository_file(fault.path).read_text(encoding="utf-8")))

    def restore(self, path: str) -> None:
        """The file as the repository has it."""
        self._write(path, repository_file(path).read_text(encoding="utf-8"))

    def _write(self, path: str, text: str) -> None:
        place = self.folder / PACKAGE / path
        place.write_text(text, encoding="utf-8")
        second = next(self._seconds)
        os.utime(place, (second, second))

    def pytest(self, arguments: Sequence[str], limit_seconds: float) -> Run:
        """Run tests of this copy; what they started is ended with them."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
        # By a thread that ends the process: a wait in C++ hears of no signal.
        command += [f"--timeout={TEST_LIMIT_SECONDS}", "--timeout-method=thread"]
        named = all("::" in argument for argument in arguments if argument.startswith("tests/"))
        # Named one by one, also those of `make test-full`.
        command += ["-m", "" if named else "not full"]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "COLUMNS": "300",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        begin = time.monotonic()
        with subprocess.Popen(
            [*command, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_seconds)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                # Interrupted first, so that its fixtures end ranks and templates, which have sessions of
                # their own.
                output, code = _end(process), None
        return Run(code, output, time.monotonic() - begin)


def _end(process: subprocess.Popen[str]) -> str:
    for number, seconds in ((signal.SIGINT, 20.0), (signal.SIGKILL, 20.0)):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
