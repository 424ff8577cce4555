"""A simulated step as shapes: rectangles, numbers and ticks for an SVG.

In: a `PlanSimulation` and a part of its time. Out: a `Drawing` of plain numbers and SVG path data, which hold
no text of a plan.

Terms. Lengths are units of the drawing's view box, `WIDTH` wide. Row: one stage. Column: one unit of width; a
row of more than `_MAX_SPANS` spans is drawn by columns, each in the colour of what fills most of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rannc_backend.report.words import seconds_text
from rannc_backend.schedule.plan_simulation import SPAN_KINDS, PlanSimulation, Span, SpanKind, StageSimulation

WIDTH = 1000.0
LABEL_WIDTH = 98.0
ROW_HEIGHT = 26.0
ROW_GAP = 6.0
AXIS_HEIGHT = 26.0
MAX_ROWS = 24
_PLOT_WIDTH = WIDTH - LABEL_WIDTH - 8.0
_DIGIT_WIDTH = 7.2
_ZOOMED_SPAN = 17.0  # room for two digits
_MAX_SPANS = 600
_MAX_TICKS = 8
_SMALLEST_PART = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The micro-batch in its rectangle; `x` is the middle, `kind` what the rectangle is."""

    x: float
    text: str
    kind: SpanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage: path data per kind, and the numbers that have room. `stage` is None for a row that stands
    for many.
    """

    stage: int | None
    label: str
    y: float
    forward: str = ""
    backward: str = ""
    weights: str = ""
    allreduce: str = ""
    numbers: tuple[Number, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A line of the time axis."""

    x: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`title`: which part of the step. `left`, `right`: where time begins and ends."""

    title: str
    height: float
    left: float
    right: float
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]


def timeline_drawings(simulation: PlanSimulation) -> tuple[Drawing, ...]:
    """The whole step; where its numbers have no room, its begin and its end as well."""
    step = simulation.step_seconds
    if step <= 0:
        return ()
    whole = _drawing(simulation, "The whole step", 0.0, step)
    typical = statistics.median(
        min(stage.forward_seconds, stage.backward_seconds) for stage in simulation.stages
    )
    room = _PLOT_WIDTH * typical / step
    if room >= _digits(simulation) or typical <= 0:
        return (whole,)
    part = min(step / 2, _PLOT_WIDTH / max(_ZOOMED_SPAN, _digits(simulation) + 1) * typical)
    if part < _SMALLEST_PART * step:  # so unlike each other that neither drawing would show anything
        return (whole,)
    return (
        whole,
        _drawing(simulation, f"The first {seconds_text(part)}", 0.0, part),
        _drawing(simulation, f"The last {seconds_text(part)}", step - part, step),
    )


def _digits(simulation: PlanSimulation) -> float:
    """Room for the largest number: a drawing that shows some numbers shows all that are not cut off at its
    ends.
    """
    return _DIGIT_WIDTH * len(str(simulation.num_micro_batches - 1)) + 1


def _drawing(simulation: PlanSimulation, title: str, start: float, end: float) -> Drawing:
    stages: list[StageSimulation | None] = list(simulation.stages)
    if len(stages) > MAX_ROWS:
        stages = [*stages[: MAX_ROWS // 2], None, *stages[-MAX_ROWS // 2 :]]
    rows = []
    for position, stage in enumerate(stages):
        y = position * (ROW_HEIGHT + ROW_GAP)
        if stage is None:
            rows.append(Row(stage=None, label=f"{len(simulation.stages) - MAX_ROWS} more stages", y=y))
        else:
            rows.append(_row(stage, y, start, end, _digits(simulation)))
    height = len(rows) * (ROW_HEIGHT + ROW_GAP) + AXIS_HEIGHT
    return Drawing(
        title=title,
        height=height,
        left=LABEL_WIDTH,
        right=LABEL_WIDTH + _PLOT_WIDTH,
        rows=tuple(rows),
        ticks=tuple(_ticks(start, end)),
    )


def _row(stage: StageSimulation, y: float, start: float, end: float, number_width: float) -> Row:
    spans = [span for span in stage.spans if span.end > start and span.start < end]
    scale = _PLOT_WIDTH / (end - start)

    def place(seconds: float) -> float:
        return LABEL_WIDTH + (min(max(seconds, start), end) - start) * scale

    boxes: list[tuple[SpanKind, float, float]] = [
        (span.kind, place(span.start), place(span.end)) for span in spans
    ]
    numbers = tuple(
        Number(x=round((left + right) / 2, 1), text=str(span.micro_batch), kind=kind)
        for span, (kind, left, right) in zip(spans, boxes, strict=True)
        if kind != "allreduce" and right - left >= number_width
    )
    if len(boxes) > _MAX_SPANS:
        boxes = _columns(spans, start, end)
    paths = {
        kind: _path(((left, right) for of_kind, left, right in boxes if of_kind == kind), y)
        for kind in SPAN_KINDS
    }
    return Row(stage=stage.index, label=f"stage {stage.index}", y=y, numbers=numbers, **paths)


def _columns(spans: Sequence[Span], start: float, end: float) -> list[tuple[SpanKind, float, float]]:
    """Runs of columns in which the same kind fills most; columns that are mostly idle are left out."""
    num_columns = int(_PLOT_WIDTH)
    seconds = (end - start) / num_columns
    filled = [dict.fromkeys(SPAN_KINDS, 0.0) for _ in range(num_columns)]
    for span in spans:
        first = max(int((span.start - start) / seconds), 0)
        last = min(math.ceil((span.end - start) / seconds), num_columns)
        for column in range(first, last):
            inside = min(span.end, start + (column + 1) * seconds) - max(span.start, start + column * seconds)
            filled[column][span.kind] += max(inside, 0.0)
    runs: list[tuple[SpanKind, float, float]] = []
    for column, shares in enumerate(filled):
        kind = max(shares, key=lambda name: shares[name])
        if 2 * sum(shares.values()) < seconds:
            continue
        left = LABEL_WIDTH + column
        if runs and runs[-1][0] == kind and runs[-1][2] == left:
            runs[-1] = (kind, runs[-1][1], left + 1)
        else:
            runs.append((kind, left, left + 1))
    return runs


def _path(boxes: Iterable[tuple[float, float]], y: float) -> str:
    """Path data of rectangles, each with a sliver of a gap where it is wide enough to spare one."""
    parts = []
    for left, right in boxes:
        width = right - left
        shown = width - 0.8 if width > 4 else width
        if shown >= 0.05:
            parts.append(f"M{left:.1f} {y:g}h{shown:.1f}v{ROW_HEIGHT:g}h-{shown:.1f}z")
    return "".join(parts)


def _ticks(start: float, end: float) -> Iterable[Tick]:
    """Round times inside of the part that is drawn."""
    rough = (end - start) / _MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
    for index in range(math.ceil(start / step), math.floor(end / step + 1e-9) + 1):
        seconds = index * step
        # A label near the right edge would be cut off.
        if seconds <= start + 0.97 * (end - start):
            x = LABEL_WIDTH + (seconds - start) / (end - start) * _PLOT_WIDTH
            yield Tick(x=round(x, 1), text=seconds_text(round(seconds, 12)))
