"""Simulated steps as text: a table beside the plan's own step, and a timeline drawn with letters.

In: a `Plan` and its `PlanSimulation`s. Out: a rich table; lines of text, one per stage, as wide as asked for.

Terms. Cell: one character of the timeline, an equal part of the step; it shows what fills most of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rannc_backend.ir.plan import Plan
from rannc_backend.report.words import change_text, count_text, percent_text, seconds_text, size_text
from rannc_backend.schedule.plan_simulation import PlanSimulation, Span, StageSimulation

IDLE, REDUCTION = ".", "="
LEGEND = "0-9 forward (last digit of micro-batch), a-j backward, = all-reduce, . idle"
COARSE_LEGEND = "F mostly forward, B mostly backward, = all-reduce, . idle"
SPLIT_LEGEND = "0-9 forward, a-j backward, k-t weight gradients, = all-reduce, . idle"
COARSE_SPLIT_LEGEND = "mostly: F forward, B backward, W weight gradients, = all-reduce, . idle"
_DIGITS = {"forward": "0123456789", "backward": "abcdefghij", "weights": "klmnopqrst"}
_COARSE = {"forward": "F", "backward": "B", "weights": "W"}
_SHOWN_STAGES = 32
_STYLES = {"forward": "cyan", "backward": "magenta", "weights": "green", "allreduce": "yellow"}


def simulation_table(plan: Plan, simulations: Sequence[PlanSimulation]) -> Table:
    """One row per simulation, the first one being what the others are compared with."""
    table = Table(
        title="Simulated steps (the first line: as planned)", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0),
    )  # fmt: skip
    for name in ("schedule", "micro-batches", "rows", "step", "change", "idle", "peak (stage)", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in simulations:
        fullest = max(item.lanes, key=item.lane_peak_bytes)
        fits = item.fits(plan.memory_limit_bytes)
        rows = sorted({stage.rows for stage in item.stages})
        table.add_row(
            item.schedule,
            str(item.num_micro_batches),
            str(rows[0]) if len(rows) == 1 else f"{rows[0]}-{rows[-1]}",
            seconds_text(item.step_seconds),
            "" if item is simulations[0] else change_text(simulations[0].step_seconds, item.step_seconds),
            percent_text(item.idle_share),
            f"{size_text(item.lane_peak_bytes(fullest))} ({', '.join(map(str, fullest))})",
            Text("yes" if fits else "no", style="default" if fits else "red"),
        )
    return table


def guess_warning(simulations: Sequence[PlanSimulation]) -> str:
    """What to say of numbers of rows far from those that the plan lists; "" if there are none."""
    guessed = [
        str(item.num_micro_batches)
        for item in simulations
        if not all(stage.is_listed for stage in item.stages)
    ]
    if not guessed:
        return ""
    return f"costs with {', '.join(guessed)} micro-batches are guessed from other numbers of rows; plan again to price them"


def timeline(simulation: PlanSimulation, width: int) -> list[Text]:
    """A line per stage and a line of time, at most `width` characters wide; stages in the middle are left out
    if many.
    """
    stages = list(simulation.stages)
    label_width = len(str(len(stages) - 1)) + len("stage ")
    num_cells = max(20, width - label_width - 1)
    is_coarse = 2 * simulation.num_micro_batches > num_cells
    shown = (
        stages
        if len(stages) <= _SHOWN_STAGES
        else [*stages[: _SHOWN_STAGES // 2], None, *stages[-_SHOWN_STAGES // 2 :]]
    )
    title = (
        f"{simulation.schedule}, {count_text(simulation.num_micro_batches, 'micro-batch', 'micro-batches')}"
    )
    lines = [Text(title, style="bold")]
    for stage in shown:
        if stage is None:
            lines.append(Text(f"... {len(stages) - _SHOWN_STAGES} more stages", style="dim"))
        else:
            label = Text(f"stage {stage.index}".ljust(label_width) + " ")
            lines.append(label + _cells(stage, simulation.step_seconds, num_cells, is_coarse))
    end = seconds_text(simulation.step_seconds)
    lines.append(Text(" " * (label_width + 1) + "0" + end.rjust(num_cells - 1), style="dim"))
    is_split = any(span.kind == "weights" for stage in stages for span in stage.spans)
    legends = (SPLIT_LEGEND, COARSE_SPLIT_LEGEND) if is_split else (LEGEND, COARSE_LEGEND)
    lines.append(Text(legends[is_coarse], style="dim"))
    return lines


def _cells(stage: StageSimulation, step_seconds: float, num_cells: int, is_coarse: bool) -> Text:
    if step_seconds <= 0:
        return Text(IDLE * num_cells)
    text = Text()
    begin, cell_seconds = 0, step_seconds / num_cells
    for cell in range(num_cells):
        start, end = cell * cell_seconds, (cell + 1) * cell_seconds
        while begin < len(stage.spans) and stage.spans[begin].end <= start:
            begin += 1
        character, style = _cell(stage.spans, begin, start, end, is_coarse)
        text.append(character, style)
    return text


def _cell(spans: Sequence[Span], begin: int, start: float, end: float, is_coarse: bool) -> tuple[str, str]:
    """Character and style of one cell; `begin`: the first span that ends after `start`."""
    filled: dict[str, float] = {}
    longest: dict[str, tuple[float, Span]] = {}
    for index in range(begin, len(spans)):
        each = spans[index]
        if each.start >= end:
            break
        inside = min(each.end, end) - max(each.start, start)
        filled[each.kind] = filled.get(each.kind, 0.0) + inside
        longest[each.kind] = max(
            longest.get(each.kind, (0.0, each)), (inside, each), key=lambda pair: pair[0]
        )
    if not filled or 2 * sum(filled.values()) < end - start:
        return IDLE, "dim"
    kind = max(filled, key=lambda name: filled[name])
    if kind == "allreduce":
        return REDUCTION, _STYLES[kind]
    if is_coarse:
        return _COARSE[kind], _STYLES[kind]
    return _DIGITS[kind][longest[kind][1].micro_batch % 10], _STYLES.get(kind, "dim")
