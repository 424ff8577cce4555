"""rannc_backend: `torch.compile(model, backend="rannc")` trains over pipeline stages and data-parallel replicas.

Importing this package imports neither torch.distributed nor mpi4py: the public names below load when first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOMES = {
    "Config": "rannc_backend.config",
    "RanncError": "rannc_backend.errors",
    "barrier": "rannc_backend.module",
    "clip_grad_norm_": "rannc_backend.module",
    "get_rank": "rannc_backend.module",
    "get_world_size": "rannc_backend.module",
    "load_deployment": "rannc_backend.module",
    "save_deployment": "rannc_backend.module",
}

__all__ = [
    "Config",
    "RanncError",
    "__version__",
    "barrier",
    "clip_grad_norm_",
    "get_rank",
    "get_world_size",
    "load_deployment",
    "save_deployment",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
