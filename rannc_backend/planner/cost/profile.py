"""Measured prices of blocks as a file: what was measured where, so that it need not be measured again.

In: measurements of this or an earlier run. Out: a `Profile`, as JSON text and back; reading is strict and
never runs anything.

Terms. A *job* is a run of blocks at one activation budget, to be compiled as a stage and timed at some
numbers of rows. A *setting* is what a measurement depends on beside the block: device, stage compiler,
versions, number of processes that share the host. A *point* is one number of rows; seconds that are None were
not possible, since memory did not suffice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rannc_backend.errors import ProfileError
from rannc_backend.ir.plan import StageCompiler

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Blocks [begin, end) at an activation budget, to be timed at `rows`, ascending."""

    begin: int
    end: int
    budget: float
    rows: tuple[int, ...]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Setting(_Record):
    """What measurements depend on; only those of an equal setting are used."""

    device_name: str
    compiler: StageCompiler
    versions: str
    num_sharing: Annotated[int, Field(ge=1)]


class Point(_Record):
    """A block at one number of rows; the seconds are None together: it did not fit."""

    rows: Annotated[int, Field(ge=1, le=2**31)]
    forward_seconds: Seconds | None
    backward_seconds: Seconds | None
    peak_bytes: Bytes | None

    @model_validator(mode="after")
    def _check_together(self) -> Point:
        given = {item is None for item in (self.forward_seconds, self.backward_seconds, self.peak_bytes)}
        if len(given) > 1:
            raise ValueError("forward_seconds, backward_seconds and peak_bytes are given or null together")
        return self

    @property
    def fits(self) -> bool:
        """Whether memory sufficed."""
        return self.forward_seconds is not None


class BlockProfile(_Record):
    """One distinct block, by structure and dtypes (a structure holds its dtypes), at one activation budget;
    points ascend by rows.

    `peak_bytes` are those beside parameters and inputs.
    """

    structure: Annotated[str, Field(min_length=1, max_length=200)]
    budget: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    setting: Setting
    points: Annotated[tuple[Point, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _check_ascending(self) -> BlockProfile:
        rows = [point.rows for point in self.points]
        if rows != sorted(set(rows)):
            raise ValueError("points do not ascend by rows")
        return self


class StageProfile(_Record):
    """A whole stage as it was measured: its blocks' structures in order, and one point."""

    fingerprint: Annotated[str, Field(max_length=200)]
    structures: Annotated[tuple[str, ...], Field(min_length=1)]
    budget: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    setting: Setting
    point: Point


class Profile(_Record):
    """All that a profile file holds."""

    kind: Literal["rannc profile"] = "rannc profile"
    schema_version: Literal[1] = 1
    blocks: tuple[BlockProfile, ...] = ()
    stages: tuple[StageProfile, ...] = ()

    def to_json(self) -> str:
        """As text, newline at the end; equal profiles give equal text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "profile") -> Profile:
        """Read and check what `to_json` wrote; raises `ProfileError`, which names `where` and what is
        wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ProfileError(
                f"{where} is no file of profiles: {place + ': ' if place else ''}{first['msg']}",
                cure="give another profile_file, or delete this one and let it be measured again",
            ) from None

    def of_setting(self, setting: Setting) -> dict[tuple[str, float], BlockProfile]:
        """The profiles that hold under `setting`, by structure and budget."""
        return {(item.structure, item.budget): item for item in self.blocks if item.setting == setting}

    def with_blocks(self, found: Iterable[BlockProfile]) -> Profile:
        """With more block profiles; points of the same block are joined, new ones replacing old ones of the
        same rows.
        """
        merged: dict[tuple[str, float, Setting], BlockProfile] = {
            (item.structure, item.budget, item.setting): item for item in self.blocks
        }
        for item in found:
            key = (item.structure, item.budget, item.setting)
            points: Mapping[int, Point] = {
                point.rows: point for point in (*getattr(merged.get(key), "points", ()), *item.points)
            }
            merged[key] = item.model_copy(update={"points": tuple(points[rows] for rows in sorted(points))})
        ordered = sorted(merged.items(), key=lambda entry: (*entry[0][:2], entry[0][2].model_dump_json()))
        return self.model_copy(update={"blocks": tuple(item for _, item in ordered)})

    def without(self, setting: Setting, structures: Collection[str]) -> Profile:
        """Without what was measured of these blocks under `setting`."""
        kept = (item for item in self.blocks if item.setting != setting or item.structure not in structures)
        return self.model_copy(update={"blocks": tuple(kept)})

    def with_stages(self, found: Iterable[StageProfile]) -> Profile:
        """With more stages; a new one replaces an old one of the same blocks, rows, budget and setting."""
        merged = {
            (item.structures, item.budget, item.setting, item.point.rows): item
            for item in (*self.stages, *found)
        }
        return self.model_copy(update={"stages": tuple(merged.values())})
