"""Configurations that are drawn at random, in the words of AutoDist, of EPL and of this project, with a model and a
training each.

In: a number. Out: `Drawn`, as JSON; the same number gives the same one. No torch: tests collect them. Values are such
that many draws can be had together, and some cannot: these are to be refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Drawn = Mapping[str, Any]
"""``words``: whose; ``items``: by name; ``more``: options beside them; ``model``: its members; ``steps``: what each does."""

ROWS = (5, 3)
NAMES = ("table", "layers.0", "layers.1", "layers.2", "layers.3", "head")
_SCHEDULES = ("auto", "1f1b", "fill_drain", "zb_h1", "list_scheduled", "interleaved", "zb_v", "v_half")
OWN: Mapping[str, Sequence[Any]] = {
    "zero_stage": (0, 1, 2, 2),
    "zero_ngroups": (2,),
    "schedule": _SCHEDULES,
    "partition_num": (1, 2, 2, 3, 4),
    "stages_per_rank": (1, 2, 3),
    "replica_num": (1, 2, 2),
    "pipeline_num": (1, 2, 3, 4, 7),
    "min_pipeline": (1, 2),
    "max_pipeline": (2, 4),
    "micro_batch_rows": (2, 4),
    "max_pipeline_bubble_ratio": (0.3, 0.9),
    "max_pipeline_unbalance_ratio": (0.1, 0.5),
    "recompute": ("auto", "segments", "marked", 0, 0.5, 1),
    "recompute_modules": ("layers", "layers.1", "ROOT", "Linear"),
    "recompute_last_stage": (0, 1, 5),
    "checkpointing": (True,),
    "verify_recomp": (True,),
    "check_gradients": (True,),
    "offload": ("parameters", "parameters", "none"),
    "boundary_dtype": ("bf16", "fp16", "fp8"),
    "gradient_dtype": ("bf16", "fp16"),
    "gradient_scale": (128.0, 3.0),
    "gradient_accumulation_dtype": ("float32", "none"),
    "num_apply_group": (2, 3, 30),
    "sparse_gradients": ("dense", "sparse"),
    "gradients_reduce_method": ("sum", "mean"),
    "skip_grad_scaling": (True,),
    "sync_allreduce": (True,),
    "bucket_mb": (0.0001, 0.001),
    "max_buckets": (1, 2, 5),
    "num_communicators": (2, 3),
    "shared_memory": (False,),
    "outputs": ("auto", "all", "loss"),
    "gather_inputs": (False,),
    "num_plans": (2, 4),
    "plan_trial_seconds": (0.0,),
    "training": (False,),
    "solver": ("ilp",),
    "placement": ("replica_major", "stage_major"),
    "mesh": ("1x2", "2x1"),
    "stage_pivots": ("layers.1", "layers.1,layers.3", "head"),
    "stage_starts": ("layers.2", "head"),
    "keep_together": ("layers.0,layers.1", "layers.2"),
    "stage_pins": ("layers.0=0,layers.3=1", "head=1"),
    "stage_replicas": ("1,1", "2", "2,1", "2,2", "1,1,1,1"),
    "stage_compiler": ("eager", "eager", "eager", "eager", "inductor"),
    "costs": ("analytic", "rules"),
    "stage_memory": ("traced", "blocks"),
    "ignore_memory": (True,),
    "mem_limit_gb": (1.0, 0.00001),
    "opt_transient_factor": (2.0,),
    "transient_memory_factor": (2.0,),
    "coarsen_by_time": (False,),
    "capture": ("nonstrict", "dynamo"),
    "autocast": ("bfloat16", "float16"),
    "validate_comm": (True,),
    "print_program": (True,),
    "report_steps": (0, 2),
    "verbose": (True,),
    "check_optimizers": (False,),
    "batch_norm": ("global",),
    "whole_batch": ("never",),
    "log_casts": (True,),
}
AUTODIST: Mapping[str, Sequence[Any]] = {
    "task_name": ("drawn",),
    "consider_mem": (True, False),
    "memory_constraint": (1.0, 80.0, 0.00001),
    "memory_granularity": (1, 524288),
    "transient_mem_coef": (2.0, 0.5),
    "opt_resident_coef": (2, 6, 0),
    "opt_transient_coef": (0, 2),
    "recompute_modules": ("", "layers", "layers.1,head", "ROOT", "Linear"),
    "zero_stage": (0, 1, 1),
    "zero_ngroups": (1, 2),
    "pipeline_pivots": ("", "layers.1", "layers.1,layers.2,layers.3", "Linear"),
    "pipeline_nstages": ("auto", 1, 2, 3, 4),
    "pipeline_scheduler": ("1f1b",),
    "max_pipeline_bubble_ratio": (0.2, 0.5, 0.9),
    "max_pipeline_unbalance_ratio": (0.5, 0.1),
    "mesh_row": (1, 2),
    "mesh_col": (1, 2),
    "world_size": (2, 4),
    "micro_batch_size": (1, 2, 4, 8),
    "update_freq": (1, 2, 4, 8),
    "parallel_profile": (True, False),
    "re_profile": (True,),
    "topk": (1, 3, 20),
    "solver": ("dp", "ilp"),
    "is_train": (True, True, False),
    "verbose": (True,),
    "ignore_small_tensor_threshold": (0, 1, 100),
}
EPL: Mapping[str, Sequence[Any]] = {
    "pipeline.num_micro_batch": (1, 2, 3, 4),
    "pipeline.num_stages": (1, 2, 2, 3, 4),
    "pipeline.strategy": ("PreferBackward", "PreferForward", "PreferBackwardOptimizer"),
    "gradient_checkpoint.type": ("", "auto", "collection"),
    "gradient_checkpoint.end_taskgraph": (-1, 0, 1),
    "gradient_checkpoint.check_gradients": (True, False),
    "zero.level": ("", "v0", "v1", "v1"),
    "offload.level": ("", "v0"),
    "amp.level": ("", "O1"),
    "amp.loss_scale": ("dynamic", 128),
    "amp.debug_log": (True,),
    "optimizer.num_apply_group": (1, 3, 30),
    "cluster.device_place_prefer_intra_node": (True, False),
    "cluster.colocate_split_and_replicate": (True, False),
    "communication.num_communicators": (1, 2),
    "communication.sparse_as_dense": (True, False),
    "communication.max_splits": (1, 5),
    "communication.fp16": (True, False),
    "communication.fp16_scale": (1, 128),
    "communication.clip_after_allreduce": (True, False),
    "communication.gradients_reduce_method": ("mean", "sum"),
    "io.slicing": (True,),
    "auto.auto_parallel": (True, False),
}
_WORDS = {"own": OWN, "autodist": AUTODIST, "epl": EPL}
_ONE_STAGE = ("1f1b", "fill_drain")
_LANES = ("interleaved", "zb_v", "v_half")
# For two ranks: stages, stages per rank, replicas, schedules.
_SHAPES: Sequence[tuple[int, int, int, Sequence[str]]] = (
    (1, 1, 2, _ONE_STAGE),
    (2, 1, 1, ("1f1b", "fill_drain", "zb_h1", "list_scheduled")),
    (2, 2, 2, _LANES),
    (4, 2, 1, _LANES),
    (6, 3, 1, ("interleaved",)),
)
# Values of these stand in each other's way so often that few draws would run.
_RARE = {
    "mem_limit_gb", "memory_constraint", "stage_starts", "stage_pins", "keep_together", "stage_replicas",
    "micro_batch_rows", "autocast", "boundary_dtype", "capture", "verify_recomp", "solver", "num_plans",
    "micro_batch_size", "topk", "amp.level", "world_size", "mesh_row", "mesh_col", "training", "is_train",
    "gather_inputs", "skip_grad_scaling", "stage_compiler",
}  # fmt: skip
STEPS = (
    "plain", "plain", "accumulate", "clip", "evaluate", "two_forwards", "zeros", "retain", "fewer_rows", "scaler",
    "state", "no_backward", "outputs_alone",
)  # fmt: skip


def drawn(number: int) -> Drawn:
    """The configuration of that number; every other one has many options of the step at once, in a shape that runs."""
    numbers = random.Random(number)
    words = "own" if number % 2 else numbers.choice(("own", "epl", "autodist"))
    items = _combined(numbers) if number % 2 else _items(_WORDS[words], numbers, (2, 6))
    more = _items(OWN, numbers, (0, 2)) if words != "own" else {}
    return {
        "words": words,
        "items": items,
        "more": more,
        "model": _model(numbers),
        "optimizer": numbers.choice(("sgd", "adam", "adam", "adamw_foreach", "rmsprop")),
        "steps": [numbers.choice(STEPS) for _ in range(4)],
    }


def _combined(numbers: random.Random) -> dict[str, Any]:
    num_stages, per_rank, replicas, schedules = numbers.choice(_SHAPES)
    wires = {
        "boundary_dtype": numbers.choice(("bf16", "fp8")),
        "gradient_dtype": numbers.choice(("bf16", "fp16")),
        "gradient_scale": numbers.choice((1.0, 64.0)),
    }
    sometimes = {
        "offload": "parameters",
        "gradient_accumulation_dtype": "float32",
        "num_apply_group": numbers.choice((2, 30)),
        "sparse_gradients": "dense",
        "sync_allreduce": True,
        "bucket_mb": 0.0005,
        "num_communicators": 2,
        "shared_memory": False,
        "check_gradients": True,
        "gradients_reduce_method": "sum",
    }
    return {
        "partition_num": num_stages,
        "stages_per_rank": per_rank,
        "replica_num": replicas,
        "schedule": numbers.choice(schedules),
        "pipeline_num": numbers.choice((2, 3, 4)),
        "zero_stage": numbers.choice((0, 1, 2)),
        "recompute": numbers.choice(("auto", "segments", "marked", 0, 0.5, 1)),
        **{name: value for name, value in sometimes.items() if numbers.random() < 0.3},
        **(wires if numbers.random() < 0.15 else {}),
    }


def _items(
    table: Mapping[str, Sequence[Any]], numbers: random.Random, least_and_most: tuple[int, int]
) -> dict[str, Any]:
    weight: Callable[[str], float] = lambda name: 0.25 if name in _RARE else 1.0  # noqa: E731
    chosen: dict[str, Any] = {}
    names = list(table)
    for _ in range(numbers.randint(*least_and_most)):
        (name,) = numbers.choices(names, [weight(name) for name in names])
        chosen[name] = numbers.choice(table[name])
    return chosen


def _model(numbers: random.Random) -> dict[str, Any]:
    return {
        "dtype": numbers.choice(("float64",) * 8 + ("float32", "bfloat16")),
        "table": numbers.choice(("dense", "dense", "dense", "sparse", "tied", "bag", "padded")),
        "loss": numbers.choice(("inside", "inside", "outside", "both")),
        "ignored": numbers.choice((False, False, True)),
        "shared_layer": numbers.choice((False, False, False, True)),
        "frozen": numbers.choice((False, False, False, True)),
        "buffer": numbers.choice((False, False, False, True)),
    }
