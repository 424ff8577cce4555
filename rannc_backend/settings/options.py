"""All options of the backend in one frozen object.

In: values by name, from sources.py. Out: a checked `Config`, and what each item accepts in words.
Terms: an *item* is one option; its environment variable is RANNC_<NAME IN CAPITALS>. Names that RaNNC has too
mean what they mean there; those of RaNNC's that can mean nothing here are in rannc_items.py. 0 means "the
planner decides" for every number of things. One GB is 1024**3 bytes.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rannc_backend.settings.choices import (
    NAME_PATTERN,
    OWN,
    OWN_PATH,
    SCHEDULE_ALIASES,
    activation_budget,
    check_schedule_name,
    number_or_truth,
    pairs_as_text,
)
from rannc_backend.settings.memory_options import MemoryOptions
from rannc_backend.settings.planning_options import PlanningOptions

ENVIRONMENT_PREFIX = "RANNC_"
ITEMS_DISAGREE = "items_disagree"
_PROFILED_STEPS = 5
# Three years: what clocks and sockets can be told to wait.
_LONGEST_SECONDS = 1e8
_MAX_COMMUNICATORS = 64  # each takes memory of the device, and threads of the host
_LARGEST_SCALE = 1e9
_PADDING = rf"{NAME_PATTERN}=(-?[0-9]+(\.[0-9]+)?|True|False|-?inf)"


class Config(MemoryOptions, PlanningOptions):
    """Options of one compiled model; frozen. Build it with ``resolve_config``, which reports invalid
    values.
    """

    capture: Literal["auto", "dynamo", "nonstrict"] = Field(
        "auto",
        description="How a model becomes a graph: dynamo: as torch.compile does it; nonstrict: its forward "
        "runs once, as Python, on fakes; auto: nonstrict where Dynamo refuses.",
    )
    whole_batch: Literal["auto", "never"] = Field(
        "auto",
        description="Where samples of a batch meet (a contrastive loss, a sort over all tokens): auto: every "
        "step runs as one micro-batch on one replica per stage, which is exact and overlaps nothing; never: "
        "such models are refused.",
    )
    batch_norm: Literal["micro_batch", "global"] = Field(
        "micro_batch",
        description="What batch normalisation takes its statistics of in training: a micro-batch on a replica, "
        "or, as one process does, all samples of the step, which then runs as one micro-batch on one replica "
        "per stage.",
    )
    autocast: Literal["none", "float16", "bfloat16"] = Field(
        "none",
        description="Calls run under torch.autocast with this dtype, where the script has not switched it on itself.",
    )
    log_casts: bool = Field(
        False,
        description="Log where the captured model casts from one floating dtype to another: a line per place.",
    )
    stage_compiler: Literal["auto", "eager", "inductor"] = Field(
        "auto",
        description="What runs a stage's graphs: eager starts fast, inductor runs fast; auto: eager where a "
        "model on CPUs is small.",
    )
    schedule: str = Field(
        "auto",
        description="Order of forwards and backwards; auto: the fastest that gives exact results. zb_h1: backwards in "
        "two parts; list_scheduled: likewise, in an order made for the plan. interleaved, zb_v: several stages on each "
        "rank, with whole backwards, and two in the shape of a V, with backwards in two parts; v_half: likewise, with half of the "
        "memory of 1f1b on every rank. gpipe is another name of fill_drain.",
    )
    outputs: Literal["auto", "all", "loss"] = Field(
        "auto",
        description="all: outputs with rows come back, each rank's own; loss: only scalars do; auto: all, but beside "
        "a loss only where they fit into half of the memory that the plan leaves.",
    )
    gather_inputs: bool = Field(
        True,
        description="True: the global batch is the ranks' batches in rank order; False: it is rank 0's "
        "batch.",
    )
    batch_dim: str = Field(
        "",
        pattern=rf"^([0-9]|{NAME_PATTERN}=[0-9](,{NAME_PATTERN}=[0-9])*)?$",
        json_schema_extra={"accepts": 'a number, as 1, or numbers by input, as {"hidden": 1} or "hidden=1"'},
        description="The dimension of the inputs that counts the samples, where it is not the first one: 1 for "
        "[length, batch, width]; inputs that have fewer dimensions have it as their last one. By input: the others "
        "have it as their first one. Such a model is captured as capture='nonstrict' does.",
    )
    pad_inputs: str = Field(
        "",
        pattern=rf"^({_PADDING}(,{_PADDING})*)?$",
        json_schema_extra={
            "accepts": 'inputs and numbers, as {"input_ids": 0, "labels": -100} or "input_ids=0"'
        },
        description="Inputs that are padded at the end, with these values, to the longest of all ranks; ranks "
        "whose inputs have different lengths are refused without.",
    )
    gradients_reduce_method: Literal["mean", "sum"] = Field(
        "mean", description="With the loss outside the model: mean or sum over ranks of each rank's gradient."
    )
    gradient_accumulation_dtype: Literal["none", "float32"] = Field(
        "none",
        description="float32: gradients of bfloat16 and float16 parameters are summed over the micro-batches and "
        "replicas of a step in float32, and rounded once to the parameter's dtype; none: in the parameter's dtype.",
    )
    sparse_gradients: Literal["sparse", "dense"] = Field(
        "sparse",
        description="Gradients of embeddings with sparse=True; sparse: ranks exchange the rows that they have, on CPUs; "
        "dense: they are summed as all others, and p.grad is dense.",
    )
    states_on_all_ranks: bool = Field(
        False,
        description="state_dict() of the model and of optimizers gives every rank the whole state; False: "
        "rank 0 alone.",
    )
    check_optimizers: bool = Field(
        True,
        description="Try an optimizer on small copies before its first step, and refuse it where it updates "
        "a parameter from others that are on other ranks.",
    )
    skip_grad_scaling: bool = Field(False, description="True: as gradients_reduce_method='sum'.")
    sync_allreduce: bool = Field(
        False,
        description="True: the all-reduces of gradients begin after a rank's last backward, instead of while "
        "it runs.",
    )
    sync_params_on_init: bool = Field(
        True, description="Give rank 0's parameters and buffers to all ranks before the first step."
    )
    visible_devices: str = Field(
        "",
        pattern=r"^([A-Za-z0-9-]+(,[A-Za-z0-9-]+)*)?$",
        json_schema_extra={"accepts": 'devices with commas between, as "0,1", or ""'},
        description="What CUDA_VISIBLE_DEVICES is set to before CUDA starts; empty: left as it is.",
    )
    start_timeout_seconds: float = Field(
        1800.0,
        gt=0,
        le=_LONGEST_SECONDS,
        description="Longest wait for all ranks to come to their first call of the backend, seconds.",
    )
    step_timeout_seconds: float = Field(
        600.0, gt=0, le=_LONGEST_SECONDS, description="Longest wait for a message within a step, seconds."
    )
    compile_timeout_seconds: float = Field(
        7200.0,
        gt=0,
        le=_LONGEST_SECONDS,
        description="Longest wait for the slowest rank to plan and compile, seconds.",
    )
    bucket_mb: float = Field(25.0, gt=0, description="Size of one gradient bucket in MB (1024**2 bytes).")
    max_buckets: int = Field(
        0,
        ge=0,
        description="In place of bucket_mb: at most so many gradient buckets, of about equal size, for the parameters of "
        "a stage that have one dtype and one updater; 0: by bucket_mb.",
    )
    num_communicators: int = Field(
        1,
        ge=1,
        le=_MAX_COMMUNICATORS,
        description="Process groups for the gradients of the same ranks, which buckets go to in turn, so that sums go on "
        "side by side; what is summed in shared memory needs none.",
    )
    boundary_dtype: Literal["same", "bf16", "fp16", "fp8"] = Field(
        "same",
        description="What floating values travel in between stages on different ranks, where that is narrower: NOT exact. "
        "fp8: values as float8 e4m3 with a scale per 128 elements, their gradients as bf16.",
    )
    gradient_dtype: Literal["same", "bf16", "fp16"] = Field(
        "same",
        description="What gradients are summed in over ranks, where that is narrower than the dtype in which they are "
        "summed over micro-batches: NOT exact.",
    )
    gradient_scale: float = Field(
        1.0,
        ge=1 / _LARGEST_SCALE,
        le=_LARGEST_SCALE,
        description="Number that gradients are multiplied by before they are rounded to gradient_dtype, and divided by "
        "after the sum.",
    )
    shared_memory: bool = Field(
        True,
        description="On CPUs, ranks of one host sum gradients in memory that they share; False: over "
        "sockets, as between hosts.",
    )
    save_deployment: bool = Field(False, description="Rank 0 saves the plan as JSON in deployment_file.")
    load_deployment: bool = Field(
        False, description="Take the plan from deployment_file, checked, instead of planning."
    )
    deployment_file: str = Field(
        "rannc_deployment.json",
        min_length=1,
        json_schema_extra=OWN_PATH,
        description="File of save_deployment and load_deployment.",
    )
    partitioning_dry_run_np: int = Field(
        0,
        ge=0,
        description="Plan for so many ranks at the first call, print and save the plan, and exit; 0: no dry "
        "run.",
    )
    report_steps: int = Field(
        5,
        ge=0,
        description="Training steps that are measured and logged beside what was predicted, after two to "
        "warm up; 0: none.",
    )
    run_file: str = Field(
        "",
        json_schema_extra=OWN,
        description="File to which rank 0 writes what the measured steps took, as JSON; empty: none.",
    )
    print_program: bool = Field(
        False, description="Log the program of each rank as text before the first step."
    )
    profiling: bool = Field(
        False,
        description=f"True: at least {_PROFILED_STEPS} steps are measured and logged, as report_steps does.",
    )
    trace_events: bool = Field(False, description="Write what every rank did, and when, to event_trace_file.")
    event_trace_file: str = Field(
        "rannc_event_trace.json",
        min_length=1,
        json_schema_extra=OWN_PATH,
        description="File of trace_events, for Perfetto or chrome://tracing.",
    )
    dump_graph: bool = Field(
        False,
        description="Rank 0 writes the captured graph and every stage's graph as text files; every rank "
        "writes the graphs before and after each pass that it ran, in the folder PREFIX.passes/rankN.",
    )
    dump_graph_prefix: str = Field(
        "rannc_graph",
        min_length=1,
        json_schema_extra=OWN_PATH,
        description="What the paths of the files of dump_graph begin with.",
    )
    validate_comm: bool = Field(
        False, description="Send a checksum with every message and check it where it arrives. Slow."
    )
    display_comm_value: bool = Field(
        False, description="Log what is sent and received, on every rank: shape, least, mean, largest. Slow."
    )
    display_act_value: bool = Field(
        False, description="Log the outputs of every stage's forward, as display_comm_value does. Slow."
    )
    show_config_items: bool = Field(
        False, json_schema_extra=OWN, description="Log every item with its value and source at start."
    )
    verbose: bool = Field(
        False,
        description="Log what was captured, split, priced, searched and compiled: a line each, with its "
        "seconds.",
    )

    @property
    def paddings(self) -> dict[str, float]:
        """`pad_inputs` by input; whole numbers are integers."""
        pairs = (item.rsplit("=", 1) for item in self.pad_inputs.split(",") if item)
        return {name: number_or_truth(text) for name, text in pairs}

    @property
    def batch_dims(self) -> dict[str, int]:
        """`batch_dim` by input; that of all inputs without a name."""
        pairs = (item.rpartition("=") for item in self.batch_dim.split(",") if item)
        return {name: int(dim) for name, _, dim in pairs}

    @property
    def mean_gradients(self) -> bool:
        """Whether gradients are averaged over ranks, not summed, with the loss outside the model."""
        return self.gradients_reduce_method == "mean" and not self.skip_grad_scaling

    @property
    def wide_sums(self) -> bool:
        """Whether gradients of 16 bits are summed in float32."""
        return self.gradient_accumulation_dtype == "float32"

    @property
    def num_measured_steps(self) -> int:
        """Steps to measure and log: `report_steps`, and some more with `profiling`."""
        return max(self.report_steps, _PROFILED_STEPS) if self.profiling else self.report_steps

    @field_validator("schedule")
    @classmethod
    def _schedule_by_its_own_name(cls, value: str) -> str:
        return value if value == "auto" else check_schedule_name(SCHEDULE_ALIASES.get(value, value))

    @field_validator("pad_inputs", "batch_dim", mode="before")
    @classmethod
    def _join_pairs(cls, value: object) -> object:
        return str(value) if type(value) is int else pairs_as_text(value)

    @model_validator(mode="after")
    def _check_items_agree(self) -> Config:
        counts = self.stage_replica_counts
        if 0 < self.max_pipeline < self.min_pipeline:
            raise _disagreement("min_pipeline", "an integer from 1 to", "max_pipeline")
        if counts and self.partition_num not in (0, len(counts)):
            raise _disagreement("stage_replicas", "as many numbers as", "partition_num")
        if counts and self.replica_num and set(counts) != {self.replica_num}:
            raise _disagreement("stage_replicas", "no other number than", "replica_num")
        if self.mesh_shape and self.num_ranks % math.prod(self.mesh_shape):
            raise _disagreement("num_ranks", "0 or a multiple of the devices of", "mesh")
        if self.run_file and not self.num_measured_steps:
            raise _disagreement("run_file", "empty without", "report_steps")
        if self.recompute_modules and (self.checkpointing or self.recompute != "auto"):
            other = "checkpointing" if self.checkpointing else "recompute"
            raise _disagreement("recompute_modules", "empty with", other)
        if self.gradient_scale != 1 and self.gradient_dtype == "same":
            raise _disagreement("gradient_scale", "1 without another", "gradient_dtype")
        if any(self.batch_dims.values()) and self.capture == "dynamo":
            raise _disagreement("batch_dim", "0 with", "capture")
        if self.checkpointing and activation_budget(self.recompute):
            raise _disagreement("checkpointing", "False with", "recompute")
        return self


def environment_name(item: str) -> str:
    """The environment variable of an item: "pipeline_num" gives "RANNC_PIPELINE_NUM"."""
    return ENVIRONMENT_PREFIX + item.upper()


def _disagreement(item: str, relation: str, other: str) -> PydanticCustomError:
    context = {"item": item, "relation": relation, "other": other}
    return PydanticCustomError(ITEMS_DISAGREE, "{item} must be {relation} {other}", context)
