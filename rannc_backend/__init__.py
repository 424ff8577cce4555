"""rannc_backend: `torch.compile(model, backend="rannc")` trains over pipeline stages and data-parallel
replicas.

Importing this package imports neither torch.distributed nor mpi4py: the public names below load when first
used.
"""

from __future__ import annotations

import importlib
import os

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOMES = {
    "all_gather": "rannc_backend.pyrannc.tensor_coll",
    "allreduce_grads": "rannc_backend.api.functions",
    "barrier": "rannc_backend.api.functions",
    "checkpoint_tensor": "rannc_backend.kernels.checkpoint_mark",
    "CheckpointReader": "rannc_backend.checkpoint.reader",
    "clear": "rannc_backend.api.functions",
    "clip_grad_norm_": "rannc_backend.api.functions",
    "Config": "rannc_backend.settings.options",
    "delay_grad_allreduce": "rannc_backend.api.functions",
    "DistributeModelParams": "rannc_backend.api.record_model",
    "gathered": "rannc_backend.api.gathered",
    "get_dist_param_range": "rannc_backend.pyrannc.tensor_coll",
    "get_dist_param_segment": "rannc_backend.pyrannc.tensor_coll",
    "get_param": "rannc_backend.api.functions",
    "get_param_grad": "rannc_backend.api.functions",
    "get_rank": "rannc_backend.api.functions",
    "get_world_size": "rannc_backend.api.functions",
    "init": "rannc_backend.api.loops",
    "is_held": "rannc_backend.api.functions",
    "join": "rannc_backend.api.loops",
    "keep_graph": "rannc_backend.api.functions",
    "latest_checkpoint": "rannc_backend.api.checkpoints",
    "load_checkpoint": "rannc_backend.api.checkpoints",
    "load_deployment": "rannc_backend.api.functions",
    "load_distributed_checkpoint": "rannc_backend.integrations.distributed_checkpoint",
    "load_pretrained": "rannc_backend.integrations.hugging_face",
    "load_dist_param": "rannc_backend.pyrannc.tensor_coll",
    "materialize_by_stage": "rannc_backend.api.materialize",
    "memory_report": "rannc_backend.api.memory",
    "named_gradient_norms": "rannc_backend.api.loops",
    "patch_optimizer": "rannc_backend.api.functions",
    "RankBatches": "rannc_backend.api.data_slices",
    "RanncError": "rannc_backend.errors",
    "row_wise": "rannc_backend.passes.batch.row_wise",
    "RaNNCModule": "rannc_backend.pyrannc.rannc_module",
    "recreate_all_communicators": "rannc_backend.api.functions",
    "remove_dist_param": "rannc_backend.pyrannc.tensor_coll",
    "save_checkpoint": "rannc_backend.api.checkpoints",
    "save_distributed_checkpoint": "rannc_backend.integrations.distributed_checkpoint",
    "save_pretrained": "rannc_backend.integrations.hugging_face",
    "save_deployment": "rannc_backend.api.functions",
    "set_dist_param": "rannc_backend.pyrannc.tensor_coll",
    "set_dist_param_dtype": "rannc_backend.pyrannc.tensor_coll",
    "show_deployment": "rannc_backend.api.functions",
    "slice_files": "rannc_backend.api.data_slices",
    "store_dist_param": "rannc_backend.pyrannc.tensor_coll",
    "sync_params_on_init": "rannc_backend.api.functions",
    "synchronize": "rannc_backend.api.synchronized_modules",
    "undeploy": "rannc_backend.api.functions",
    "wait_for_checkpoint": "rannc_backend.api.checkpoints",
    "write_event_trace": "rannc_backend.api.trace",
}

# RaNNC has these as submodules.
_MODULES = {"amp": "rannc_backend.pyrannc.amp", "tensor_coll": "rannc_backend.pyrannc.tensor_coll"}

__all__ = [
    "__version__",
    "all_gather",
    "allreduce_grads",
    "barrier",
    "checkpoint_tensor",
    "CheckpointReader",
    "clear",
    "clip_grad_norm_",
    "Config",
    "delay_grad_allreduce",
    "DistributeModelParams",
    "gathered",
    "get_dist_param_range",
    "get_dist_param_segment",
    "get_param",
    "get_param_grad",
    "get_rank",
    "get_world_size",
    "init",
    "is_held",
    "join",
    "keep_graph",
    "latest_checkpoint",
    "load_checkpoint",
    "load_deployment",
    "load_dist_param",
    "load_distributed_checkpoint",
    "load_pretrained",
    "materialize_by_stage",
    "memory_report",
    "named_gradient_norms",
    "patch_optimizer",
    "RankBatches",
    "RanncError",
    "RaNNCModule",
    "row_wise",
    "recreate_all_communicators",
    "remove_dist_param",
    "save_checkpoint",
    "save_deployment",
    "save_distributed_checkpoint",
    "save_pretrained",
    "set_dist_param",
    "set_dist_param_dtype",
    "show_deployment",
    "slice_files",
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
    importlib.import_module("rannc_backend.runtime.job.disabled_compile").warn_if_disabled(
        os.environ, stacklevel=2
    )
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
