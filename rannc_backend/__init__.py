"""rannc_backend: `torch.compile(model, backend="rannc")` trains over pipeline stages and data-parallel replicas.

Importing this package imports neither torch.distributed nor mpi4py: the public names below load when first used.
"""

from __future__ import annotations

import importlib
import os

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOMES = {
    "all_gather": "rannc_backend.tensor_coll",
    "allreduce_grads": "rannc_backend.module",
    "barrier": "rannc_backend.module",
    "CheckpointReader": "rannc_backend.checkpoint.reader",
    "clear": "rannc_backend.module",
    "clip_grad_norm_": "rannc_backend.module",
    "Config": "rannc_backend.config",
    "delay_grad_allreduce": "rannc_backend.module",
    "DistributeModelParams": "rannc_backend.model_recording",
    "get_dist_param_range": "rannc_backend.tensor_coll",
    "get_dist_param_segment": "rannc_backend.tensor_coll",
    "get_param": "rannc_backend.module",
    "get_param_grad": "rannc_backend.module",
    "get_rank": "rannc_backend.module",
    "get_world_size": "rannc_backend.module",
    "is_held": "rannc_backend.module",
    "keep_graph": "rannc_backend.module",
    "latest_checkpoint": "rannc_backend.checkpoint_api",
    "load_checkpoint": "rannc_backend.checkpoint_api",
    "load_deployment": "rannc_backend.module",
    "load_dist_param": "rannc_backend.tensor_coll",
    "materialize_by_stage": "rannc_backend.stage_values",
    "patch_optimizer": "rannc_backend.module",
    "RanncError": "rannc_backend.errors",
    "row_wise": "rannc_backend.passes.row_wise",
    "RaNNCModule": "rannc_backend.rannc_module",
    "recreate_all_communicators": "rannc_backend.module",
    "remove_dist_param": "rannc_backend.tensor_coll",
    "save_checkpoint": "rannc_backend.checkpoint_api",
    "save_deployment": "rannc_backend.module",
    "set_dist_param": "rannc_backend.tensor_coll",
    "set_dist_param_dtype": "rannc_backend.tensor_coll",
    "show_deployment": "rannc_backend.module",
    "store_dist_param": "rannc_backend.tensor_coll",
    "sync_params_on_init": "rannc_backend.module",
    "synchronize": "rannc_backend.synchronized_modules",
    "undeploy": "rannc_backend.module",
    "wait_for_checkpoint": "rannc_backend.checkpoint_api",
    "write_event_trace": "rannc_backend.trace_api",
}

# RaNNC has these as submodules.
_MODULES = ("amp", "tensor_coll")

__all__ = [
    "__version__",
    "all_gather",
    "allreduce_grads",
    "barrier",
    "CheckpointReader",
    "clear",
    "clip_grad_norm_",
    "Config",
    "delay_grad_allreduce",
    "DistributeModelParams",
    "get_dist_param_range",
    "get_dist_param_segment",
    "get_param",
    "get_param_grad",
    "get_rank",
    "get_world_size",
    "is_held",
    "keep_graph",
    "latest_checkpoint",
    "load_checkpoint",
    "load_deployment",
    "load_dist_param",
    "materialize_by_stage",
    "patch_optimizer",
    "RanncError",
    "RaNNCModule",
    "row_wise",
    "recreate_all_communicators",
    "remove_dist_param",
    "save_checkpoint",
    "save_deployment",
    "set_dist_param",
    "set_dist_param_dtype",
    "show_deployment",
    "store_dist_param",
    "sync_params_on_init",
    "synchronize",
    "undeploy",
    "wait_for_checkpoint",
    "write_event_trace",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.disabled_compile").warn_if_disabled(os.environ, stacklevel=2)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
