"""Options of recompute: what the backward computes again instead of keeping it, and whether that is looked at.

In: values by name. Out: the part of `Config` (options.py) that says it. *Told*: the user names what is computed again,
and the search does not choose.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rannc_backend.settings.choices import (
    MARKED,
    NAMES_PATTERN,
    SEGMENTS_BUDGET,
    activation_budget,
    names_as_text,
)


class RecomputeOptions(BaseModel):
    """See `Config`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    recompute: str = Field(
        "auto",
        pattern=r"^(auto|segments|marked|0(\.[0-9]+)?|1(\.0+)?)$",
        json_schema_extra={"accepts": '"auto", "segments", "marked", or a number from 0 to 1'},
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

    @field_validator("recompute", mode="before")
    @classmethod
    def _number_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("recompute_modules", mode="before")
    @classmethod
    def _join_modules(cls, value: object) -> object:
        return names_as_text(value)
