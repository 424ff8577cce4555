"""RaNNC's loggers and the modules of this package that do what they told of.

In: a logger's name in `logging.toml`: one of RaNNC's, or a module's own. Out: names of Python loggers.
"""

from __future__ import annotations

from collections.abc import Mapping

ROOT_LOGGER = "rannc_backend"

# Below rannc_backend. A module belongs to the logger that names it, else to the one that names its package, else to root.
MODULES: Mapping[str, tuple[str, ...]] = {
    "root": ("",),
    "main": ("backend",),
    "RaNNCModule": ("session", "module", "rannc_module", "stage_values", "model_recording"),
    "RaNNCProcess": ("runtime",),
    "GraphLauncher": ("runtime.graph_runtime", "runtime.executor", "runtime.autograd"),
    "GraphValueStorage": ("runtime.messages", "runtime.rows", "runtime.step_state", "runtime.user_outputs"),
    "GraphUtil": ("analysis", "passes"),
    "ConvertGraph": ("capture", "capture_dynamo", "capture_trace", "capture_model", "capture_inputs", "capture_breaks"),
    "Decomposer": ("planning", "planning_factory", "planning_file", "partition.planner", "partition.plan_request", "block_partitions"),
    "Decomposition": ("deployment", "deployment_file", "partition.projection", "partition.plan_checks"),
    "MLPartitioner": ("partition.blocks", "partition.coarsening", "partition.line_cuts", "partition.atom_graph"),
    "DPStaging": ("partition",),
    "GraphProfiler": ("profiling", "pricers", "calibration", "measured", "runtime.meter", "cost"),
    "ParamStorage": ("runtime.parameters", "runtime.promises", "checkpoint", "checkpoint_api", "optimizer_state"),
    "GraphConnector": ("schedule", "runtime.transport_watch"),
    "TorchDriver": (
        "compile_stages", "compile_joint", "compile_inductor", "compile_cache", "compile_variants", "compile_partitions", "compile_watched",
    ),
    "AllReduceRunner": ("runtime.buckets", "runtime.accumulation", "runtime.late_reductions", "runtime.clipping"),
    "NCCLWrapper": ("runtime.transport", "runtime.transport_nccl", "runtime.transport_staged", "runtime.device_watch"),
    "SComm": ("runtime.control", "runtime.control_mpi", "runtime.agreement"),
    # Nothing here slices the weights of linear layers; the name is taken, so that a file of RaNNC's is.
    "DistLinearFunction": (),
}


def python_loggers(name: str) -> tuple[str, ...] | None:
    """Names of the Python loggers that a logger of the file stands for; None if there is no such logger."""
    if name in MODULES:
        return tuple(f"{ROOT_LOGGER}.{module}" if module else ROOT_LOGGER for module in MODULES[name])
    if name == ROOT_LOGGER or name.startswith(f"{ROOT_LOGGER}."):
        return (name,)
    return None
