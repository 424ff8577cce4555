"""Tests that need a CUDA device: collected everywhere, skipped without one, and refused in words where a package is missing.

The one reason to skip is that there is no device.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def missing_packages(requirements: str) -> list[str]:
    """Names in a requirements file that are not installed."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    names = [match[0] for line in lines if (match := re.match(r"[A-Za-z0-9._-]+", line))]
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if not here:
        return
    if not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        return
    missing = missing_packages((ROOT / "requirements-gpu.txt").read_text(encoding="utf-8"))
    if missing:
        pytest.exit(f"the tests on a GPU need {', '.join(missing)}: pip install -r requirements-gpu.txt", 2)
