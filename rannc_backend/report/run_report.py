"""What a run measured beside what its plan predicted, for people and as a file.

In: a plan and one record per rank, as `runtime/trace/meter.py` makes them. Out: a `RunReport` with a table
and JSON.

Terms. A stage's measured seconds are those of its slowest rank, its peak bytes those of its fullest one, with all stages
that this has.
*Waiting* is the time in which a rank had nothing to do: for messages, and at the end of a step for the
gradients of its replicas. *Step* is the time from when all ranks have arrived to when the last one has done
its part, without the optimizer. A *ratio* is measured / predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan, StagePlan

SCHEMA_VERSION = 1
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class StageRun(_Record):
    """One stage: forward and backward per micro-batch, the rest per step, bytes per rank.

    `structures` are those of its blocks, so that the figures can be told to belong to the blocks of another
    plan. `rows` is the most rows of one micro-batch on one rank.
    """

    stage: Annotated[int, Field(ge=0)]
    structures: tuple[str, ...]
    rows: Annotated[int, Field(ge=1)]
    num_replicas: Annotated[int, Field(ge=1)]
    recompute: Annotated[float, Field(ge=0, le=1)]
    forward_seconds: Seconds
    backward_seconds: Seconds
    waiting_seconds: Seconds
    sending_seconds: Seconds
    reducing_seconds: Seconds
    step_seconds: Seconds
    peak_bytes: Bytes
    predicted_forward_seconds: Seconds
    predicted_backward_seconds: Seconds
    predicted_waiting_seconds: Seconds
    predicted_peak_bytes: Bytes


class RunReport(_Record):
    """A measured run. `comparable`: its batches had the rows and micro-batches that the plan was made for."""

    kind: Literal["rannc run"] = "rannc run"
    schema_version: Literal[1] = 1
    fingerprint: str
    model_name: str
    device_name: str
    costs_from: str
    world_size: Annotated[int, Field(ge=1)]
    num_rows: Annotated[int, Field(ge=1)]
    num_micro_batches: Annotated[int, Field(ge=1)]
    num_steps: Annotated[int, Field(ge=1)]
    comparable: bool
    step_seconds: Seconds
    predicted_step_seconds: Seconds
    stages: Annotated[tuple[StageRun, ...], Field(min_length=1)]

    def to_json(self) -> str:
        """The report as text, newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunReport:
        """Read and check what `to_json` wrote; raises `PlanError` saying what is wrong with it."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise PlanError(
                f"not a file of a measured run: {place + ': ' if place else ''}{first['msg']}",
                cure="give a file that the option run_file wrote.",
            ) from None

    def table(self) -> str:
        """A few lines for people: per stage measured / predicted and the ratio."""
        lines = [
            f"measured over {self.num_steps} step(s) of {self.num_rows} rows in {self.num_micro_batches} "
            f"micro-batch(es), beside predicted (costs: {self.costs_from}): step "
            f"{_pair(self.step_seconds, self.predicted_step_seconds)}"
        ]
        if not self.comparable:
            lines.append(
                "  these batches differ from the one that was planned for, so the figures cannot be compared"
            )
        head = ("stage", "forward", "backward", "waiting", "step", "peak memory")
        rows = [head, *(_cells(stage, self.predicted_step_seconds) for stage in self.stages)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def report_of(plan: Plan, records: Sequence[Mapping[str, Any]]) -> RunReport | None:
    """The report of all ranks' records, by rank; None when no step could be measured."""
    if not all(records):
        return None
    num_rows, num_micro_batches = records[0]["num_rows"], records[0]["num_micro_batches"]
    return RunReport(
        fingerprint=plan.fingerprint,
        model_name=plan.model_name,
        device_name=plan.cluster.device_name,
        costs_from=plan.costs_from,
        world_size=plan.world_size,
        num_rows=num_rows,
        num_micro_batches=num_micro_batches,
        num_steps=records[0]["num_steps"],
        comparable=num_rows == plan.batch_rows and num_micro_batches == plan.num_micro_batches,
        step_seconds=max(record["step_seconds"] for record in records),
        predicted_step_seconds=plan.predicted_step_seconds,
        stages=tuple(
            _stage_run(plan, stage, [records[rank] for rank in stage.ranks]) for stage in plan.stages
        ),
    )


def _stage_run(plan: Plan, stage: StagePlan, records: Sequence[Mapping[str, Any]]) -> StageRun:
    def most(item: str) -> Any:
        return max(record[item] for record in records)

    def longest(kind: str) -> float:
        return max(record["stages"][str(stage.index)][f"{kind}_seconds"] for record in records)

    cost = stage.predicted
    most_rows = -(-records[0]["num_rows"] // records[0]["num_micro_batches"])
    names = ("waiting", "sending", "reducing", "step")
    return StageRun(
        stage=stage.index,
        structures=tuple(plan.blocks[index].structure for index in stage.blocks),
        rows=-(-most_rows // stage.num_replicas),
        num_replicas=stage.num_replicas,
        recompute=stage.recompute,
        peak_bytes=most("peak_bytes"),
        predicted_forward_seconds=cost.forward_seconds,
        predicted_backward_seconds=cost.backward_seconds,
        predicted_waiting_seconds=cost.idle_share * plan.predicted_step_seconds,
        predicted_peak_bytes=plan.lane_peak_bytes(stage.index),
        forward_seconds=longest("forward"),
        backward_seconds=longest("backward"),
        **{f"{name}_seconds": most(f"{name}_seconds") for name in names},
    )


def _cells(stage: StageRun, predicted_step_seconds: float) -> tuple[str, ...]:
    waiting = stage.waiting_seconds + stage.reducing_seconds
    peak = f"{stage.peak_bytes / 2**20:.1f} / {stage.predicted_peak_bytes / 2**20:.1f} MB"
    return (
        str(stage.stage),
        _pair(stage.forward_seconds, stage.predicted_forward_seconds),
        _pair(stage.backward_seconds, stage.predicted_backward_seconds),
        _pair(waiting, stage.predicted_waiting_seconds),
        _pair(stage.step_seconds, predicted_step_seconds),
        f"{peak} ({_ratio(stage.peak_bytes, stage.predicted_peak_bytes)})",
    )


def _pair(measured: float, predicted: float) -> str:
    scale, unit = (1.0, "s") if max(measured, predicted) >= 1 else (1e3, "ms")
    return f"{measured * scale:.3g} / {predicted * scale:.3g} {unit} ({_ratio(measured, predicted)})"


def _ratio(measured: float, predicted: float) -> str:
    return f"x{measured / predicted:.2f}" if predicted > 0 else "-"
