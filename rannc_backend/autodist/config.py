"""`AutoDistConfig`: the items of AutoDist's document, checked when it is made, and the options that they stand for.

In: items by name. Out: `AutoDistConfig.options()`, for `torch.compile(model, backend="rannc", options=...)`, which takes
the object itself too. No behaviour is here: each item is one or more options of this package (table.py), and
docs/autodist_parity.md says what was decided where AutoDist's document leaves it open. An item that is not passed stands
for nothing: AutoDist's defaults are of one device. One that is passed binds, also where it is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rannc_backend.autodist.table import check_items, items_of, options_of
from rannc_backend.errors import OptionValueError, UnknownOptionError
from rannc_backend.settings.sources import check_translated

SOURCE = "AutoDistConfig"
# As in options.py: what JSON and int64 carry.
_LARGEST = 2**53
_NAME = r"([^\s,=]+\s*)?"
_NAMES = rf"^\s*{_NAME}(,\s*{_NAME})*$"
_PATH = r"^[^\x00]*$"


class AutoDistConfig(BaseModel):
    """AutoDist's items with its names, defaults and ranges; frozen.

    Raises:
        UnknownOptionError: a name that AutoDist does not have; says the nearest that it has.
        OptionValueError: a value of another type or out of range, items that exclude each other, a plan to load that is
            not there, or partition_constraints_path, which needs operators that are split.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    task_name: str = Field("default", min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
    consider_mem: bool = True
    memory_constraint: float = Field(32.0, gt=0, le=_LARGEST)
    memory_granularity: int = Field(1, ge=1, le=_LARGEST)
    transient_mem_coef: float = Field(2.0, gt=0, le=_LARGEST)
    opt_resident_coef: int = Field(2, ge=0, le=_LARGEST)
    opt_transient_coef: int = Field(0, ge=0, le=_LARGEST)
    recompute_modules: str = Field("", pattern=_NAMES)
    zero_stage: int = Field(0, ge=0, le=1)
    zero_ngroups: int = Field(1, ge=1, le=_LARGEST)
    pipeline_pivots: str = Field("", pattern=_NAMES)
    pipeline_nstages: int | Literal["auto"] = "auto"
    pipeline_scheduler: Literal["1f1b"] = "1f1b"
    max_pipeline_bubble_ratio: float = Field(0.2, gt=0, lt=1)
    max_pipeline_unbalance_ratio: float = Field(0.5, gt=0, lt=1)
    mesh_row: int = Field(1, ge=1, lt=10**9)
    mesh_col: int = Field(1, ge=1, lt=10**9)
    world_size: int = Field(1, ge=1, le=_LARGEST)
    micro_batch_size: int = Field(1, ge=1, lt=10**9)
    update_freq: int = Field(1, ge=1, lt=10**9)
    profile_dir: str = Field("", pattern=_PATH)
    parallel_profile: bool = True
    re_profile: bool = False
    topk: int = Field(20, ge=1, le=_LARGEST)
    solver: Literal["dp", "ilp"] = "dp"
    nproc: int = Field(1, ge=1, lt=10**6)
    load_plan_path: str = Field("", pattern=_PATH)
    save_plan_path: str = Field("", pattern=_PATH)
    partition_constraints_path: str = ""
    is_train: bool = True
    verbose: bool = False
    ignore_small_tensor_threshold: int = Field(1, ge=0, le=_LARGEST)

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name not in type(self).model_fields:
                raise UnknownOptionError(
                    name,
                    valid=type(self).model_fields,
                    source=SOURCE,
                    listed="docs/autodist_parity.md lists all items.",
                )
        try:
            super().__init__(**items)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            item, found = str(first["loc"][0]), first["msg"]
            annotation = type(self).model_fields[item].annotation
            names = [name for part in get_args(annotation) for name in (get_args(part) or (part,))]
            raise OptionValueError(
                item,
                value=items[item],
                source=SOURCE,
                expected=f"a value as AutoDist documents it: {found[0].lower()}{found[1:]}",
                choices=[name for name in names if isinstance(name, str)],
            ) from None
        check_items(self.given())
        check_translated(self.options(), items_of(self.given()), self.given(), SOURCE)

    def given(self) -> Mapping[str, Any]:
        """The items that were passed, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }

    def options(self) -> dict[str, Any]:
        """The options of this package that the items stand for, for `torch.compile(..., options=...)`."""
        return options_of(self.given())

    def notices(self) -> tuple[str, ...]:
        """Lines for the log about what is not as AutoDist does it: there are none, as no item changes results."""
        return ()
