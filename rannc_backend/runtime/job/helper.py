"""Starts a helper process of a job: `python -I -S helper.py MODULE ARGUMENT...`, with the standard library
only.

In: the name of a module of this folder that has a `main`. Out: its end. The folders become packages without
their `__init__`, so that the module and what it imports find each other, and neither torch nor anything from
site-packages is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

_PACKAGES = ("rannc_backend", "rannc_backend.runtime", "rannc_backend.runtime.job")
_MODULES = ("supervisor", "start_watch")


def command_of(name: str, *arguments: str) -> list[str]:
    """What starts the helper process `name`."""
    assert name in _MODULES, name
    return [sys.executable, "-I", "-S", __file__, name, *arguments]


def main() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in reversed(_PACKAGES):
        module = types.ModuleType(name)
        module.__path__ = [folder]
        sys.modules[name] = module
        folder = os.path.dirname(folder)
    assert sys.argv[1] in _MODULES, sys.argv[1]
    importlib.import_module(f"{_PACKAGES[-1]}.{sys.argv[1]}").main()


if __name__ == "__main__":
    main()
