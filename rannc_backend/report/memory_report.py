"""What lies in memory, by stage: what the plan predicted beside what there is.

In: a plan and one record per rank. Out: a `MemoryReport` with a table.

Terms. Measured bytes of a stage are those of its fullest rank, kind by kind. *Step* is what exists only within a step:
activations of all micro-batches in flight, and what operators need while they run. It and the *peak* are known once
the first training steps have been measured (`runtime/trace/meter.py`). Where parameters are offloaded, parameters and
gradients are the most that a step has had on the device; they, and optimizer state, lie *on the host*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rannc_backend.ir.plan import Plan, StageCost
from rannc_backend.report.words import size_text

Bytes = Annotated[int, Field(ge=0)]

KINDS: Mapping[str, str] = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "messages": "messages and outputs",
    "step": "activations and workspace",
    "peak": "peak",
    "host": "on the host",
}


class MemoryBytes(BaseModel):
    """Bytes on one rank by kind; None: not known."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes | None
    messages: Bytes
    step: Bytes | None
    peak: Bytes | None
    host: Bytes | None = None


class StageMemory(BaseModel):
    """One stage, or those that share ranks: what the plan predicted of a rank, and the fullest rank."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    stages: tuple[Annotated[int, Field(ge=0)], ...]
    ranks: tuple[int, ...]
    predicted: MemoryBytes
    measured: MemoryBytes


class MemoryReport(BaseModel):
    """All stages of a model; ``str(report)`` is a table."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model_name: str
    stages: tuple[StageMemory, ...]

    def __str__(self) -> str:
        rows = [("stages", "ranks", "", "predicted", "measured", "measured / predicted")]
        for stage in self.stages:
            for kind, name in KINDS.items():
                predicted, measured = getattr(stage.predicted, kind), getattr(stage.measured, kind)
                if kind == "host" and not predicted and not measured:
                    continue
                ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
                first = ("", "")
                if kind == "parameters":
                    first = (", ".join(map(str, stage.stages)), ", ".join(map(str, stage.ranks)))
                rows.append((*first, name, _text(predicted), _text(measured), ratio))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join([f"memory of {self.model_name}", *(line.rstrip() for line in lines)])


def memory_report_of(plan: Plan, records: Sequence[Mapping[str, int | None]]) -> MemoryReport:
    """The report of all ranks' records, by rank: the fields of `MemoryBytes`."""
    return MemoryReport(
        model_name=plan.model_name,
        stages=tuple(
            StageMemory(
                stages=lane,
                ranks=plan.stages[lane[0]].ranks,
                predicted=_predicted([plan.stages[index].predicted for index in lane]),
                measured=MemoryBytes.model_validate(
                    {
                        kind: _most([records[rank][kind] for rank in plan.stages[lane[0]].ranks])
                        for kind in KINDS
                    }
                ),
            )
            for lane in plan.lanes
        ),
    )


def _predicted(costs: Sequence[StageCost]) -> MemoryBytes:
    return MemoryBytes(
        parameters=sum(cost.parameter_bytes for cost in costs),
        gradients=sum(cost.gradient_bytes for cost in costs),
        optimizer=sum(cost.optimizer_bytes for cost in costs),
        messages=sum(cost.buffer_bytes for cost in costs),
        step=sum(cost.activation_bytes + cost.workspace_bytes for cost in costs),
        peak=sum(cost.peak_bytes for cost in costs),
        host=sum(cost.host_bytes for cost in costs),
    )


def _most(values: Sequence[int | None]) -> int | None:
    """The largest; None where one is not known."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) and known else None


def _text(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else size_text(num_bytes)
