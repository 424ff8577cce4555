"""Options of planning: how a model is cut into stages, replicas and micro-batches, and what prices that.

In: values by name. Out: the part of `Config` (options.py) that says it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic.config import JsonDict

from rannc_backend.settings.choices import (
    NAME_PATTERN,
    NAMES_PATTERN,
    OWN,
    OWN_PATH,
    Options,
    names_as_text,
    pairs_as_text,
)

# More is no number of ranks, and a number of thousands of digits is none for int().
_COUNT = r"[1-9][0-9]{0,8}"
_MODULES: JsonDict = {
    "accepts": 'module names with commas between, as "encoder.layer.12,decoder" (a list in options), or ""'
}


class PlanningOptions(Options):
    """See `Config`."""

    plan_name: str = Field(
        "",
        max_length=200,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        json_schema_extra={"accepts": "a line of at most 200 characters"},
        description="Name of the job: kept in its plan, and at the start of every message about the plan.",
    )
    training: bool = Field(
        True,
        description="False: plan for inference, as if nothing needed a gradient: no backward, and no memory for gradients, "
        "optimizer state or what backward needs. Calls that train still do, and may need more memory.",
    )
    num_ranks: int = Field(
        0, ge=0, description="Number of ranks that the job must have, or that is planned for; 0: any."
    )
    mesh: str = Field(
        "",
        pattern=rf"^({_COUNT}x{_COUNT})?$",
        json_schema_extra={"accepts": 'nodes x devices of each, as "2x4", or ""'},
        description="Nodes, and devices of each, that are planned for; the job must have as many ranks, or num_ranks "
        "where that is given, a multiple. Empty: the nodes that there are.",
    )
    micro_batch_rows: int = Field(
        0,
        ge=0,
        description="Rows of a micro-batch, of all replicas together, of which the first batch must be a multiple (of "
        "pipeline_num of them, where that is given); 0: any.",
    )
    partition_num: int = Field(0, ge=0, description="Number of pipeline stages; 0: the planner decides.")
    stages_per_rank: int = Field(
        0,
        ge=0,
        description="Number of stages that each rank computes: 1, or more under schedule interleaved (any number) or "
        "zb_v and v_half (2); 0: the planner decides.",
    )
    replica_num: int = Field(
        0, ge=0, description="Number of replicas of every stage; 0: the planner decides."
    )
    stage_replicas: str = Field(
        "",
        pattern=rf"^({_COUNT}(,{_COUNT})*)?$",
        json_schema_extra={"accepts": 'numbers of at least 1 with commas between, as "2,1,1", or ""'},
        description="Number of replicas of each stage, first stage first; empty: the planner decides. Stages on the "
        "same ranks, under schedule interleaved, zb_v or v_half, have the same.",
    )
    placement: Literal["auto", "replica_major", "stage_major"] = Field(
        "auto",
        description="Where there are several nodes: replica_major: the stages of one pipeline are on one node where "
        "they fit; stage_major: the replicas of a stage are; auto: the planner decides.",
    )
    max_partition_num: int = Field(
        160,
        ge=1,
        description="Largest number of blocks into which the planner cuts the model before it forms stages.",
    )
    min_partition_num: int = Field(
        0,
        ge=0,
        description="Number of clusters at which coarsening stops, before blocks are cut; 0: twice "
        "max_partition_num.",
    )
    coarsen_by_time: bool = Field(
        True,
        description="True: blocks are alike in time; False: in the memory of what they keep for backward.",
    )
    stage_starts: str = Field(
        "",
        pattern=NAMES_PATTERN,
        json_schema_extra=_MODULES,
        description="Modules that must start a stage, by dotted name.",
    )
    stage_pivots: str = Field(
        "",
        pattern=NAMES_PATTERN,
        json_schema_extra={
            "accepts": 'ends of module names or class names with commas between, as "encoder.layer,GPT2Block" (a list in '
            'options), or ""'
        },
        description="Modules at which stages may start, and nowhere else, but for the first; empty: anywhere.",
    )
    keep_together: str = Field(
        "",
        pattern=NAMES_PATTERN,
        json_schema_extra=_MODULES,
        description="Modules that must each stay in one stage, by dotted name.",
    )
    stage_pins: str = Field(
        "",
        pattern=rf"^({NAME_PATTERN}=[0-9]{{1,9}}(,{NAME_PATTERN}=[0-9]{{1,9}})*)?$",
        json_schema_extra={
            "accepts": 'module=stage with commas between, as "encoder=0,decoder=1" (a dict in options), or ""'
        },
        description="Stages of modules, counted from 0: module=stage, by dotted name.",
    )
    pipeline_num: int = Field(
        0, ge=0, description="Number of micro-batches of a step; 0: the planner decides."
    )
    min_pipeline: int = Field(
        1, ge=1, description="Smallest number of micro-batches that the planner may choose."
    )
    max_pipeline: int = Field(
        0,
        ge=0,
        description="Largest number of micro-batches that the planner may choose; 0: as many as the batch has rows.",
    )
    max_pipeline_bubble_ratio: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest share of a step that ranks may idle by its order and uneven stages; 0: no limit.",
    )
    max_pipeline_unbalance_ratio: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Smallest fastest / slowest stage's time (against its name: higher is more even); 0: no limit.",
    )
    num_plans: int = Field(
        1,
        ge=1,
        le=100,
        description="Number of plans that are kept, the best ones of those that differ in cuts, replicas or micro-batches; "
        "the plan lists the others among its alternatives. Those that may turn out to be the fastest are measured before "
        "the first step.",
    )
    plan_trial_seconds: float = Field(
        60.0,
        ge=0,
        allow_inf_nan=False,
        description="No other plan of num_plans is deployed to be measured after so long; 0: none is.",
    )
    solver: Literal["dp", "ilp"] = Field(
        "dp",
        description="What searches for stages: dp: shortest paths and branch and bound, work limited by numbers; ilp: the "
        "same problem as mixed-integer programmes (HiGHS of scipy), limited by solver_seconds.",
    )
    solver_seconds: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="Most seconds of a search with solver ilp; what is not proven by then is reported as a gap.",
    )
    search_processes: int = Field(
        1,
        ge=1,
        json_schema_extra=OWN,
        description="Processes that search for plans at the same time, on the rank that plans; the plan is the same.",
    )
    costs: Literal["auto", "analytic", "measured", "rules"] = Field(
        "auto",
        description="What plans are priced with: a model of the device, or each distinct block measured; "
        "auto: measured on GPUs. rules: as analytic, but each block by its forward operators alone, "
        "untraced: quicker and coarser, without recompute.",
    )
    profile_file: str = Field(
        "",
        description="File in which measured blocks are kept and looked up, or the run_file of a run to learn "
        "from; empty: none.",
    )
    parallel_profile: bool = Field(
        True,
        description="True: ranks share the distinct blocks that are measured; False: rank 0 measures all, while the others "
        "compute nothing.",
    )
    profile_again: bool = Field(
        False,
        description="Measure again what the file of measured blocks has, and write it anew; plans of earlier runs are not "
        "taken.",
    )
    save_graph_profile: bool = Field(
        False, description="Write measured blocks to graph_profile_file, where profile_file is empty."
    )
    load_graph_profile: bool = Field(
        False, description="Look measured blocks up in graph_profile_file, where profile_file is empty."
    )
    graph_profile_file: str = Field(
        "rannc_graph_profiles.json",
        min_length=1,
        json_schema_extra=OWN_PATH,
        description="File of save_graph_profile and load_graph_profile.",
    )
    profile_by_acc: bool = Field(
        True,
        description="True: a stage costs the sum of its blocks; False: the plan's stages are measured whole "
        "and planned again.",
    )
    stage_memory: Literal["auto", "blocks", "traced"] = Field(
        "auto",
        description="Memory of a plan's stages: the sum over their blocks, or traced as a whole, which takes "
        "about as long as capture and is all but exact; auto: traced where a stage of a small model comes "
        "near to the limit.",
    )
    profiling_iter: int = Field(10, ge=1, description="Most timings of a block at one number of rows.")
    cluster: str = Field(
        "local",
        min_length=1,
        json_schema_extra={
            "accepts": '"local", the name of a shipped description (as "a100-80gb") or the path of a TOML '
            "file"
        },
        description="Cluster to plan for; local: the one at hand, measured once and remembered.",
    )
    cache_dir: str = Field(
        "",
        json_schema_extra=OWN,
        description="Directory of what is measured or planned once and remembered; empty: rannc in "
        "$XDG_CACHE_HOME or ~/.cache.",
    )
    plan_cache: bool = Field(
        True,
        description="Keep plans in cache_dir, and take the plan of an earlier run of the same job from "
        "there; False: plan anew.",
    )

    @property
    def stage_replica_counts(self) -> tuple[int, ...]:
        """`stage_replicas` as numbers; () when the planner decides."""
        return tuple(int(count) for count in self.stage_replicas.split(",")) if self.stage_replicas else ()

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """Nodes and devices of each of `mesh`; None for none."""
        nodes, _, devices = self.mesh.partition("x")
        return (int(nodes), int(devices)) if devices else None

    @property
    def prices_by_rules(self) -> bool:
        """Whether blocks are priced without what each one saves and computes again."""
        return self.costs == "rules"

    @property
    def measures_nothing(self) -> bool:
        """Whether prices come from a model of the device, also where blocks could be measured."""
        return self.costs in ("analytic", "rules")

    @property
    def profile_to_read(self) -> str:
        """File in which measured blocks are looked up; "" for none."""
        return self.profile_file or (self.graph_profile_file if self.load_graph_profile else "")

    @property
    def profile_to_write(self) -> str:
        """File to which measured blocks are written; "" for none."""
        return self.profile_file or (self.graph_profile_file if self.save_graph_profile else "")

    @field_validator("stage_starts", "stage_pivots", "keep_together", mode="before")
    @classmethod
    def _join_names(cls, value: object) -> object:
        return names_as_text(value)

    @field_validator("stage_pins", mode="before")
    @classmethod
    def _join_pins(cls, value: object) -> object:
        return pairs_as_text(value)
