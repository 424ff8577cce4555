"""AutoDist's items as options of this package: one function for each item, which sees all that were given.

In: items that were given, checked one by one. Out: options by name; an `OptionValueError` where items exclude each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from rannc_backend.errors import OptionValueError

Items = Mapping[str, Any]
Translation = Callable[[Any, Items], dict[str, Any]]

PROFILE = "rannc_blocks.json"
"""Name of the file of measured blocks in `profile_dir`."""


def options_of(given: Items) -> dict[str, Any]:
    """The options that the items stand for."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= TABLE[name](value, given)
    return found


def items_of(given: Items) -> dict[str, str]:
    """The item that each option comes from; of several the last."""
    return {option: name for name, value in given.items() for option in TABLE[name](value, given)}


def check_items(given: Items) -> None:
    """Raise `OptionValueError` where items exclude each other, name a file that is not there, or cannot be had."""
    if path := given.get("partition_constraints_path"):
        _refuse(
            "partition_constraints_path",
            path,
            "no value: such a file will say how operators may be split over the devices of a stage, and none is split yet",
        )
    loaded, saved = given.get("load_plan_path"), given.get("save_plan_path")
    if loaded and saved:
        _refuse(
            "load_plan_path",
            loaded,
            f"no value with save_plan_path, which is {saved!r}: a plan that is loaded is there",
        )
    if loaded and not os.path.isfile(os.path.expanduser(loaded)):
        _refuse("load_plan_path", loaded, "the path of a plan that is there: there is no such file")
    if given.get("pipeline_nstages", 1) != "auto" and given.get("pipeline_nstages", 1) < 1:
        _refuse("pipeline_nstages", given["pipeline_nstages"], "'auto', or an integer of at least 1")
    if given.get("pipeline_nstages") == 1 and given.get("pipeline_pivots"):
        expected = f"'auto' or more than 1 with pipeline_pivots, which is {given['pipeline_pivots']!r}"
        _refuse("pipeline_nstages", 1, expected)
    _check_ranks(given)


def _check_ranks(given: Items) -> None:
    if "world_size" not in given:
        return
    world, (rows, columns) = given["world_size"], _mesh(given)
    if world % (rows * columns):
        expected = f"a multiple of mesh_row x mesh_col = {rows} x {columns} = {rows * columns}"
        _refuse("world_size", world, expected)
    groups = given.get("zero_ngroups", 1)
    if given.get("zero_stage") and world % groups:
        _refuse("zero_ngroups", groups, f"a number that divides world_size, which is {world}")


def _refuse(item: str, value: Any, expected: str) -> NoReturn:
    raise OptionValueError(item, value=value, source="AutoDistConfig", expected=expected)


def _mesh(given: Items) -> tuple[int, int]:
    return given.get("mesh_row", 1), given.get("mesh_col", 1)


def _as(option: str, form: Callable[[Any], Any] = lambda value: value) -> Translation:
    return lambda value, _: {option: form(value)}


def _where_given(option: str, form: Callable[[Any], Any] = lambda value: value) -> Translation:
    """For items of which an empty text stands for nothing."""
    return lambda value, _: {option: form(value)} if value else {}


def _names(value: str) -> str:
    return ",".join(part.strip() for part in value.split(",") if part.strip())


def _mesh_option(_: int, given: Items) -> dict[str, Any]:
    rows, columns = _mesh(given)
    return {"mesh": f"{rows}x{columns}"}


def _micro_batch(value: int, given: Items) -> dict[str, Any]:
    """Of all ranks together: a mesh of which there are several copies computes as many micro-batches at a time."""
    rows, columns = _mesh(given)
    copies = given.get("world_size", rows * columns) // (rows * columns) if _has_mesh(given) else 1
    return {"micro_batch_rows": value * copies}


def _has_mesh(given: Items) -> bool:
    return "mesh_row" in given or "mesh_col" in given


def _file_in(directory: str, _: Items) -> dict[str, Any]:
    return {"profile_file": os.path.join(os.path.expanduser(directory), PROFILE)} if directory else {}


def _plan_file(switch: str) -> Translation:
    return lambda path, _: {switch: True, "deployment_file": os.path.expanduser(path)} if path else {}


TABLE: Mapping[str, Translation] = MappingProxyType(
    {
        "task_name": _as("plan_name"),
        "consider_mem": _as("ignore_memory", lambda value: not value),
        "memory_constraint": _as("mem_limit_gb"),
        "memory_granularity": _as("memory_granularity_bytes"),
        "transient_mem_coef": _as("transient_memory_factor"),
        "opt_resident_coef": _as("opt_param_factor", float),
        "opt_transient_coef": _as("opt_transient_factor", float),
        "recompute_modules": _where_given("recompute_modules", _names),
        "zero_stage": _as("zero_stage", str),
        "zero_ngroups": _as("zero_ngroups"),
        "pipeline_pivots": _where_given("stage_pivots", _names),
        "pipeline_nstages": lambda value, _: {} if value == "auto" else {"partition_num": value},
        # An order of forwards and backwards; in inference there are no backwards.
        "pipeline_scheduler": lambda value, given: {"schedule": value} if given.get("is_train", True) else {},
        "max_pipeline_bubble_ratio": _as("max_pipeline_bubble_ratio"),
        "max_pipeline_unbalance_ratio": _as("max_pipeline_unbalance_ratio"),
        "mesh_row": _mesh_option,
        "mesh_col": _mesh_option,
        "world_size": _as("num_ranks"),
        "micro_batch_size": _micro_batch,
        "update_freq": _as("pipeline_num"),
        "profile_dir": _file_in,
        "parallel_profile": _as("parallel_profile"),
        "re_profile": _as("profile_again"),
        "topk": _as("num_plans"),
        "solver": _as("solver"),
        "nproc": _as("search_processes"),
        "load_plan_path": _plan_file("load_deployment"),
        "save_plan_path": _plan_file("save_deployment"),
        "partition_constraints_path": lambda _value, _given: {},
        "is_train": _as("training"),
        "verbose": _as("verbose"),
        "ignore_small_tensor_threshold": _as("small_tensor_elements"),
    }
)
"""By item, the options that it stands for."""
