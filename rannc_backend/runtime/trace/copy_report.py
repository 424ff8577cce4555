"""What was copied to bring values and gradients to their place, stage by stage and micro-batch by
micro-batch.

In: what each rank counted in its first step of a graph. Out: a `PlanCopies` for all ranks, which prints as a
table.

Terms: values and gradients of values *move* in messages between stages; gradients of parameters are *born* in
their bucket or copied there. A launch is a kernel started on a device; on a CPU, a copy made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.world import World

logger = logging.getLogger(__name__)

MESSAGES, BUCKETS = "messages", "buckets"


@dataclass(slots=True)
class StepCopies:
    """One rank's counts in one step, by what they are for and by micro-batch."""

    counts: dict[tuple[str, int], CopyReport] = field(default_factory=dict)

    def add(self, purpose: str, micro_batch: int, report: CopyReport) -> None:
        """Count one more copy, or what moved without one."""
        key = (purpose, micro_batch)
        self.counts[key] = self.counts.get(key, CopyReport()) + report

    def words(self) -> list[list[object]]:
        """Itself as JSON can carry it."""
        return [
            [*key, report.bytes_copied, report.bytes_without_copy, report.launches]
            for key, report in sorted(self.counts.items())
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCopies:
    """A stage's counts, summed over its ranks: element m of each tuple is micro-batch m."""

    index: int
    messages: tuple[CopyReport, ...]
    buckets: tuple[CopyReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCopies:
    """The counts of one step of a plan."""

    stages: tuple[StageCopies, ...]

    def total(self, purpose: str) -> CopyReport:
        """Over all stages and micro-batches; ``purpose``: "messages" or "buckets"."""
        reports = [
            report
            for stage in self.stages
            for report in (stage.messages if purpose == MESSAGES else stage.buckets)
        ]
        return sum(reports, CopyReport())

    def __str__(self) -> str:
        lines = ["copies in one step, by stage and micro-batch (MB copied + MB without a copy, launches):"]
        for stage in self.stages:
            for number, (messages, buckets) in enumerate(zip(stage.messages, stage.buckets, strict=True)):
                lines.append(
                    f"stage {stage.index}, micro-batch {number}: messages {_text(messages)}; gradients "
                    f"{_text(buckets)}"
                )
        lines.append(
            f"in all: messages {_text(self.total(MESSAGES))}; gradients {_text(self.total(BUCKETS))}"
        )
        return "\n".join(lines)


def plan_copies(
    stage_ranks: Sequence[Sequence[int]],
    num_micro_batches: int,
    words_by_rank: Sequence[Sequence[Sequence[Any]]],
) -> PlanCopies:
    """All ranks' counts put together. ``words_by_rank``: `StepCopies.words` of each rank."""
    stages = []
    for index, ranks in enumerate(stage_ranks):
        counts: dict[tuple[str, int], CopyReport] = {}
        for rank in ranks:
            for purpose, number, *numbers in words_by_rank[rank]:
                key = (str(purpose), int(number))
                counts[key] = counts.get(key, CopyReport()) + CopyReport(*numbers)
        stages.append(
            StageCopies(
                index=index,
                messages=_row(counts, MESSAGES, num_micro_batches),
                buckets=_row(counts, BUCKETS, num_micro_batches),
            )
        )
    return PlanCopies(stages=tuple(stages))


def _row(
    counts: Mapping[tuple[str, int], CopyReport], purpose: str, num_micro_batches: int
) -> tuple[CopyReport, ...]:
    return tuple(counts.get((purpose, number), CopyReport()) for number in range(num_micro_batches))


def _text(report: CopyReport) -> str:
    return f"{report.bytes_copied / 2**20:.3f} + {report.bytes_without_copy / 2**20:.3f}, {report.launches}"


@dataclass(slots=True, kw_only=True)
class CopyLog:
    """What the first training step of a graph has copied: on this rank, and with ``verbose`` on all, which
    rank 0 logs.
    """

    label: str
    world: World
    stage_ranks: Sequence[Sequence[int]]
    verbose: bool
    own: StepCopies | None = None
    plan: PlanCopies | None = None

    def take(self, copies: StepCopies, num_micro_batches: int) -> None:
        """Note the first step, at its end. Collective with ``verbose``."""
        if self.own is not None:
            return
        self.own = copies
        if self.verbose:
            words = agree(self.world, f"count of copies of {self.label}", copies.words())
            self.plan = plan_copies(self.stage_ranks, num_micro_batches, words)
            logger.info("%s: %s", self.label, self.plan)
