"""Tests that need a CUDA device: collected everywhere, skipped without one, and refused in words where a
package is missing.

The one reason to skip is that there is no device, and with --require-gpu (`make test-gpu`) there is none:
every way to test less than all that was asked for ends the run with an error.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def missing_packages(requirements: str) -> list[str]:
    """Names in a requirements file that this Python needs and that are not installed."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    missing = []
    for requirement in (Requirement(line) for line in lines if line):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # for another Python
        try:
            importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
    return missing


def why_no_device() -> str:
    """In a line, as far as torch and the environment tell."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install one from an index of CUDA builds"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty"
    return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees none; does nvidia-smi work, is the driver new enough?"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not session.config.getoption("require_gpu") or exitstatus != 0:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    counts = {kind: len(reporter.stats.get(kind, ())) for kind in ("passed", "skipped", "xfailed")}
    if counts["skipped"] or counts["xfailed"] or not counts["passed"]:
        told = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        reporter.write_line(
            f"ERROR: with --require-gpu every chosen test must run and pass: {told}", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if not here:
        return
    if not torch.cuda.is_available():
        if config.getoption("require_gpu"):
            pytest.exit(f"no CUDA device for the tests on a GPU: {why_no_device()}", 2)
        for item in here:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        return
    missing = missing_packages((ROOT / "requirements-gpu.txt").read_text(encoding="utf-8"))
    if missing:
        pytest.exit(f"the tests on a GPU need {', '.join(missing)}: pip install -r requirements-gpu.txt", 2)
