"""Which systems, Pythons and versions of torch the backend supports, and whether this one is among them.

In: names and versions, passed in so that tests can fake them. Out: `Finding`s. README.md and pyproject.toml
say the same: a test compares.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence

from rannc_backend.doctor.findings import Finding
from rannc_backend.settings.torch_version import NEWEST, OLDEST

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
_SYSTEM = "Linux"
_MACHINES = ("x86-64", "aarch64")
_OTHER_NAMES = {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}


def _numbers(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


_TORCH = f"{_numbers(OLDEST)} to {_numbers(NEWEST)}"
_PYTHON = f"{_numbers(OLDEST_PYTHON)} to {_numbers(NEWEST_PYTHON)}"
SUPPORTED_PLATFORMS = f"{_SYSTEM} on {' or '.join(_MACHINES)}, CPython {_PYTHON}, torch {_TORCH}"
"""In one line, as README.md says it."""


def check_platform(system: str, machine: str) -> Finding:
    """Whether this operating system and processor are supported; `system`, `machine`: as the module platform
    names them.
    """
    known = _OTHER_NAMES.get(machine.lower(), machine)
    if system != _SYSTEM or known not in _MACHINES:
        text = f"{system or 'an unknown system'} on {known or 'an unknown processor'} is not supported"
        return Finding(name="platform", status="problem", text=text, cure=f"use {SUPPORTED_PLATFORMS}.")
    return Finding(
        name="platform", status="ok", text=f"{system} on {known}; supported: {SUPPORTED_PLATFORMS}"
    )


def check_python(found: Sequence[int], implementation: str = "") -> Finding:
    """Whether this Python is one that the package runs on."""
    made_by = implementation or platform.python_implementation()
    text = f"{_numbers(found)} ({made_by}, {sys.executable})"
    if made_by != "CPython" or not OLDEST_PYTHON <= tuple(found[:2]) <= NEWEST_PYTHON:
        cure = f"use CPython {_numbers(OLDEST_PYTHON)} to {_numbers(NEWEST_PYTHON)}."
        return Finding(name="Python", status="problem", text=text, cure=cure)
    return Finding(name="Python", status="ok", text=text)


def check_torch(installed: str | None, imported: str | None = None, error: str = "") -> Finding:
    """Whether this torch is one that the package runs on.

    Args:
        installed: version of the installed package; None for none.
        imported: version of what `import torch` gives; None: as installed.
        error: why the import fails; "" if it does not.
    """
    cure = f"install torch {_TORCH}: pip install 'torch>={_numbers(OLDEST)},<{_numbers((NEWEST[0], NEWEST[1] + 1))}'."
    if error:
        text = f"{installed or 'not installed'}, and it cannot be imported: {error}"
        if installed is not None:
            cure = "install it again, built for this machine (CPU or CUDA), and see that nothing else named torch is on PYTHONPATH."
        return Finding(name="torch", status="problem", text=text, cure=cure)
    found = imported or installed
    match = re.match(r"(\d+)\.(\d+)", found or "")
    if found is None or match is None:
        return Finding(name="torch", status="problem", text="not installed", cure=cure)
    numbers = (int(match[1]), int(match[2]))
    if numbers < OLDEST:
        return Finding(name="torch", status="problem", text=f"{found} is too old", cure=cure)
    if installed is not None and _release(installed) != _release(found):
        text = f"{found} is imported, and {installed} is installed"
        cure = "take the other torch off PYTHONPATH, or install one of them again."
        return Finding(name="torch", status="warning", text=text, cure=cure)
    if numbers > NEWEST:
        text = f"{found} is newer than what has been tried"
        return Finding(name="torch", status="warning", text=text, cure=f"if it fails, {cure}")
    return Finding(name="torch", status="ok", text=found)


def _release(version: str) -> str:
    return version.split("+")[0]


def import_torch() -> tuple[str | None, str]:
    """What version `import torch` gives, and why it fails; one of the two."""
    try:
        import torch
    except Exception as error:  # a library of its own may raise anything
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return str(torch.__version__), ""
