"""RaNNC's loggers and the modules of this package that do what they told of.

In: a logger's name in `logging.toml`: one of RaNNC's, or a module's own. Out: names of Python loggers.
"""

from __future__ import annotations

from collections.abc import Mapping

ROOT_LOGGER = "rannc_backend"

# Below rannc_backend. A module belongs to the logger that names it, else to the one that names its package,
# else to root.
MODULES: Mapping[str, tuple[str, ...]] = {
    "root": ("",),
    "main": ("backend",),
    "RaNNCModule": (
        "session",
        "api.functions",
        "pyrannc.rannc_module",
        "api.materialize",
        "api.record_model",
    ),
    "RaNNCProcess": ("runtime",),
    "GraphLauncher": ("runtime.step.graph_runtime", "runtime.step.executor", "runtime.step.autograd"),
    "GraphValueStorage": (
        "runtime.step.messages",
        "runtime.rows",
        "runtime.step.step_state",
        "runtime.step.user_outputs",
    ),
    "GraphUtil": ("capture.analysis", "passes"),
    "ConvertGraph": (
        "capture.graph",
        "capture.dynamo",
        "capture.aten_trace",
        "capture.nonstrict.meta_model",
        "capture.inputs",
        "capture.errors",
    ),
    "Decomposer": (
        "planner.plan_model",
        "cli.model_factory",
        "planner.blocks_file",
        "planner.planner",
        "planner.plan_request",
        "planner.blocks.block_partitions",
    ),
    "Decomposition": ("deployment", "ir.plan_file", "planner.projection", "planner.plan_fits_graph"),
    "MLPartitioner": (
        "planner.blocks.cut_blocks",
        "planner.blocks.coarsening",
        "planner.blocks.line_cuts",
        "planner.blocks.atom_graph",
    ),
    "DPStaging": ("planner",),
    "GraphProfiler": (
        "planner.blocks.measure",
        "planner.choose_pricer",
        "planner.cluster.this_machine",
        "report.run_report",
        "runtime.trace.meter",
        "planner.cost",
    ),
    "ParamStorage": (
        "runtime.parameters",
        "runtime.deferred",
        "checkpoint",
        "api.checkpoints",
        "api.whole_optimizer_state",
    ),
    "GraphConnector": ("schedule", "runtime.comm.checked"),
    "TorchDriver": (
        "stages.compiled_stage",
        "stages.joint_graph",
        "stages.inductor",
        "stages.compile_ahead",
        "stages.cache",
        "stages.variants",
        "planner.blocks.partitions",
        "stages.checked_stage",
    ),
    "AllReduceRunner": (
        "runtime.gradients.buckets",
        "runtime.gradients.delayed_reduction",
        "runtime.gradients.bucket_reductions",
        "runtime.gradients.clipping",
    ),
    "NCCLWrapper": (
        "runtime.comm.gloo",
        "runtime.comm.nccl",
        "runtime.comm.staged",
        "runtime.comm.device_watch",
    ),
    "SComm": ("runtime.comm.control", "runtime.comm.control_mpi", "runtime.agreement"),
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
