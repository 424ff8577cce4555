"""Programs and simulated steps as text for people.

In: programs, a simulated step. Out: text. (`ir.action.format_programs` gives the form that parses back.)
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from ..ir.action import SEND_KINDS, Action, Program
from .simulator import SimulatedStep

_MAX_COLUMNS = 400
_LEGEND = """\
# F forward, B backward; of a message: S send, R post receive, W wait for it, D wait until the send has left;
# A arm reductions, G wait for them; I the rank's own input rows, O its own output rows.
"""


def render_program(program: Program, *, width: int = 110) -> str:
    """One line per compute action, wrapped at `width`: what is posted and waited for before it, then the action in
    brackets, then what is sent after it. The line is headed by the action, the last one by "end"."""
    lines: list[str] = []
    words: list[str] = []
    heading = ""
    for action in program:
        if heading and action.kind not in SEND_KINDS:
            lines.append(_line(heading, words, width))
            heading, words = "", []
        if action.is_compute:
            heading = str(action)
        words.append(f"[{action}]" if action.is_compute else str(action))
    if words:
        lines.append(_line(heading or "end", words, width))
    return "".join(f"{line}\n" for line in lines)


def render_programs(programs: Mapping[int, Program], *, width: int = 110) -> str:
    """A legend, then `render_program` of every lane under a heading with its number of actions."""
    parts = [_LEGEND]
    for lane in sorted(programs):
        parts.append(f"lane {lane}: {len(programs[lane])} actions\n{render_program(programs[lane], width=width)}")
    return "\n".join(parts)


def render_grid(step: SimulatedStep, *, cell_seconds: float | None = None) -> str:
    """A time grid: one row per lane, one cell per `cell_seconds` (default: the shortest compute), "." where idle.

    An action shows its kind and micro-batch in its first cell and "-" in the following ones. At most 400 cells are
    drawn: of computes shorter than a cell, the last one shows.
    """
    computes = [timed for timed in step.timeline if timed.action.is_compute and timed.end > timed.start]
    if not computes:
        return "(no compute)\n"
    cell = max(cell_seconds or min(timed.end - timed.start for timed in computes), step.makespan_seconds / _MAX_COLUMNS)
    num_cells = max(1, round(step.makespan_seconds / cell))
    rows = [["."] * num_cells for _ in step.busy_seconds]
    for timed in computes:
        first = min(round(timed.start / cell), num_cells - 1)
        rows[timed.lane][first] = _label(timed.action)
        for index in range(first + 1, min(num_cells, round(timed.end / cell))):
            rows[timed.lane][index] = "-"
    width = max(len(text) for row in rows for text in row)
    lines = [f"lane {lane} |" + " ".join(f"{text:<{width}}" for text in row).rstrip() for lane, row in enumerate(rows)]
    lines.append(
        f"one cell {cell:.3g} s, step {step.makespan_seconds:.4g} s, busy {step.busy_share:.1%}, "
        f"bubble {step.bubble_share:.1%}"
    )
    return "".join(f"{line}\n" for line in lines)


def _label(action: Action) -> str:
    return f"{action.kind}{action.micro_batch}"


def _line(heading: str, words: list[str], width: int) -> str:
    indent = " " * 8
    return textwrap.fill(
        " ".join(words),
        width,
        initial_indent=f"{heading:<8}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
