"""Items that mean nothing here, RaNNC's and retired ones: accepted, checked, and answered with what took
their place.

In: an item and its value. Out: whether it is one of these, and one line for the user. Names, types and
defaults are those of RaNNC 0.7.5's configuration, of the example file of 0.4.2, and of earlier versions of
this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetiredItem:
    """`default`: as it was, and so its type. `instead`: what took its place, a sentence without its full
    stop.
    """

    default: bool | int | str
    instead: str

    @property
    def type(self) -> type:
        """bool, int or str."""
        return type(self.default)

    @property
    def accepts(self) -> str:
        """What it takes, in words."""
        return {bool: "True or False", int: "an integer", str: "a string"}[self.type]


_SEARCH = "the search looks at every number of stages and of replicas, and says how far from the best plan it can be at most"
_PLAN_FILES = (
    "a plan is kept with save_deployment, and the blocks with their prices by `rannc plan --save-blocks`"
)
_MONITOR = "a monitor always runs, ends the job when a rank fails and says which; step_timeout_seconds limits every wait"
_STATE = "each rank asks the owners for the parameters that it needs, over the transport of the step"

RETIRED: Mapping[str, RetiredItem] = {
    "alloc_repl_flat": RetiredItem(True, "the planner tries both orders of ranks and prices the links "
    "between them"),
    "alloc_solutions_file_prefix": RetiredItem("", _PLAN_FILES),
    "auto_parallel": RetiredItem(True, "it is always on; partition_num=1 asks for data parallelism alone"),
    "checkpointing_no_last": RetiredItem(False, "recompute='auto' decides for each stage, the last one too, "
    "by what its memory asks for"),
    "consolidate_grads": RetiredItem(False, "gradients always lie in flat buffers, which are summed right; "
    "bucket_mb is their size"),
    "cuda_graphs": RetiredItem("off", "the kernels of a stage are launched one by one, as they were with "
    "'off'"),
    "decomposer": RetiredItem("ml_part", "there is one planner; partition_num, stage_starts and stage_pins "
    "shape what it may do"),
    "disable_balancing": RetiredItem(False, "the planner balances stages by what a step takes; stage_pins "
    "overrule it"),
    "do_coarsening": RetiredItem(True, "the model's own order is tried too, and kept unless the coarsened "
    "one is clearly better"),
    "do_uncoarsening": RetiredItem(False, "blocks are always cut in the finest line, and the cuts are the "
    "best of that line"),
    "dp_search_all": RetiredItem(False, _SEARCH),
    "dump_dp_cache": RetiredItem("", _PLAN_FILES),
    "dump_dp_node_profiles": RetiredItem("", "profile_file holds every measured block as JSON"),
    "enable_kineto": RetiredItem(False, "torch.profiler works around a step, and trace_events records the "
    "schedule"),
    "force_dist_matmul": RetiredItem(False, "parameters are whole on each replica of a stage; more stages "
    "make them smaller"),
    "graph_profiling": RetiredItem(False, "costs='measured' measures blocks, and report_steps measures steps"),
    "limit_dev_num_more_than_bs": RetiredItem(True, "every replica of a stage gets at least one row of every "
    "micro-batch"),
    "limit_dev_num_pot": RetiredItem(True, "a stage may have any number of replicas, and the best is "
    "searched for"),
    "load_alloc_solutions": RetiredItem(False, _PLAN_FILES),
    "load_mlpart_results": RetiredItem(False, _PLAN_FILES),
    "max_mp_num": RetiredItem(8, "partition_num gives the number of stages, and without it the planner "
    "decides"),
    "min_pipeline_bs": RetiredItem(1, "prices of small micro-batches include what starting a kernel costs; "
    "max_pipeline limits them"),
    "mlpart_results_file": RetiredItem("", _PLAN_FILES),
    "p2p_comm": RetiredItem(True, "rows always travel as messages, straight from the ranks that hold them to "
    "those that need them"),
    "profile_dump_path": RetiredItem("", "profile_file holds every measured block as JSON"),
    "profiler_cache_size": RetiredItem(0, _STATE),
    "run_watchdog": RetiredItem(False, _MONITOR),
    "save_alloc_solutions": RetiredItem(False, _PLAN_FILES),
    "save_mlpart_results": RetiredItem(False, _PLAN_FILES),
    "use_amp_master_param": RetiredItem(False, "torch.autocast and torch.amp.GradScaler take the place of "
    "Apex"),
    "use_mpi_to_gather_dist_params": RetiredItem(False, _STATE),
    "use_named_tensors": RetiredItem(False, "the batch dimension is followed through every operator of the "
    "captured graph"),
    "verify_partitioning": RetiredItem(False, "every plan is checked against the graph, node by node, on "
    "every rank"),
    "watchdog_lockfile_dir": RetiredItem("", _MONITOR),
}  # fmt: skip


def retired_notice(item: str, source: str) -> str:
    """One line for who sets a retired item."""
    return f"{item} (from {source}) is accepted and changes nothing: {RETIRED[item].instead}"
