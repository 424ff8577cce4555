"""Options of memory: its limit and account, what the backward computes again instead of keeping it, and where
optimizer state and parameters lie.

In: values by name. Out: the part of `Config` (options.py) that says it. *Told*: the user names what is computed again,
and the search does not choose.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rannc_backend.settings.choices import (
    MARKED,
    NAMES_PATTERN,
    SEGMENTS_BUDGET,
    Options,
    activation_budget,
    names_as_text,
)


class MemoryOptions(Options):
    """See `Config`."""

    recompute: str = Field(
        "auto",
        pattern=r"^(auto|segments|marked|0(\.[0-9]+)?|1(\.0+)?)$",
        json_schema_extra={
            "accepts": '"auto", "segments", "marked", or a number from 0 to 1',
            "names": ["auto", "segments", "marked"],
        },
        description="Activation budget of every stage: 1 recomputes nothing, 0 all; segments: all, but a part of "
        "the stage (about a layer) at a time, whose input is kept; marked: all but the tensors that the model gives to "
        "rannc_backend.checkpoint_tensor; auto: as much as memory asks for, per stage.",
    )
    recompute_modules: str = Field(
        "",
        pattern=NAMES_PATTERN,
        json_schema_extra={
            "accepts": 'ends of module names, class names or ROOT with commas between, as "encoder.layer,GPT2Block" (a '
            'list in options), or ""'
        },
        description="Modules of which each recomputes what stays inside of it; all else is kept. ROOT: the whole model.",
    )
    recompute_last_stage: int = Field(
        -1,
        ge=-1,
        description="Last stage, counted from 0, that recomputes; later ones keep all. -1: no limit.",
    )
    checkpointing: bool = Field(False, description="True: every stage recomputes all it can, as recompute=0.")
    verify_recomp: bool = Field(
        False,
        description="True: every backward also runs without recompute, and gradients that differ are logged. "
        "Slow; takes its memory.",
    )
    check_gradients: bool = Field(
        False,
        description="True: backwards of the first step that a stage was compiled for also run without recompute, and "
        "gradients that differ are an error.",
    )
    mem_limit_gb: float = Field(
        0.0, ge=0, description="Memory limit per device in GB; 0: all the device has."
    )
    ignore_memory: bool = Field(
        False,
        description="True: plans may use any memory, whatever mem_limit_gb says and devices have; what they need is reported.",
    )
    mem_margin: float = Field(
        0.1, ge=0, lt=1, description="Fraction of the memory limit that plans leave free."
    )
    opt_param_factor: float = Field(
        2.0, ge=0, description="Bytes of optimizer state per byte of parameters (Adam: 2, SGD: 0)."
    )
    opt_transient_factor: float = Field(
        0.0,
        ge=0,
        description="Bytes that an optimizer's step needs besides, per byte of the parameters that it updates at a time; "
        "activations are gone then, so the larger of the two counts.",
    )
    transient_memory_factor: float = Field(
        0.0,
        ge=0,
        description="A stage's workspace is so many times the two largest of its operators, each with what it reads and "
        "makes in forward, and what recompute needs besides; 0: as its graphs say.",
    )
    memory_granularity_bytes: int = Field(
        1, ge=1, description="Every part of a stage's memory is rounded up to a multiple of so many bytes."
    )
    small_tensor_elements: int = Field(
        0,
        ge=0,
        description="Parameters and values of fewer elements are left out of what plans count as memory; of a value with "
        "rows, those of one row. 0: all count.",
    )
    num_apply_group: int = Field(
        1,
        ge=1,
        description="In how many parts of its parameters an optimizer steps, one after the other, so that what the "
        "step needs besides is smaller; the result is the same.",
    )
    zero_stage: str = Field(
        "auto",
        pattern=r"^(auto|0|1|2)$",
        json_schema_extra={"accepts": '"auto", 0, 1 or 2', "names": ["auto"]},
        description="1: each parameter has one replica of its stage that updates it and keeps its optimizer state; "
        "2: which also keeps its gradient alone; 0: every replica updates all; auto: 1 where memory makes that faster, "
        "else 0.",
    )
    zero_ngroups: int = Field(
        1,
        ge=1,
        description="Groups of a stage's replicas under zero_stage, each with all of the optimizer state: new values "
        "stay within a group.",
    )
    offload: Literal["none", "auto", "parameters"] = Field(
        "none",
        description="parameters: they lie on the host, and so do gradients and optimizer state; stages have copies. "
        "auto: so where no plan fits without it.",
    )

    @property
    def told_recompute(self) -> str:
        """What the user names of what is computed again or kept: `MARKED`, or `recompute_modules`; "" if nothing."""
        return MARKED if self.recompute == MARKED else self.recompute_modules

    @property
    def fixed_recompute(self) -> float | None:
        """`recompute` as a number, 0 with `checkpointing`; None when the planner decides."""
        if self.checkpointing:
            return 0.0
        return SEGMENTS_BUDGET if self.told_recompute else activation_budget(self.recompute)

    @property
    def zero_level(self) -> int | None:
        """`zero_stage` as a number; None when the planner decides."""
        return None if self.zero_stage == "auto" else int(self.zero_stage)

    @field_validator("recompute", mode="before")
    @classmethod
    def _number_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("recompute_modules", mode="before")
    @classmethod
    def _join_modules(cls, value: object) -> object:
        return names_as_text(value)

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _level_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
