"""The commands `rannc show`, `rannc diff` and `rannc simulate`: plans for people.

In: plan files. Out: text on stdout, a page of HTML in a file; errors are `RanncError`, before anything is
printed. Needs no torch.
"""

from __future__ import annotations

import io
import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rannc_backend.errors import OptionValueError
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_file import read_plan, write_text
from rannc_backend.schedule.orders import ScheduleName, schedule_names
from rannc_backend.settings.choices import SCHEDULE_ALIASES

PlanPath = Annotated[
    Path, typer.Argument(help="Plan as JSON, as the option save_deployment writes it.", show_default=False)
]


def show(
    plan: PlanPath,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained page here.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what is shown as JSON.")] = False,
) -> None:
    """Print a plan: its stages, what they cost, what binds it, what lost and what would help."""
    loaded = read_plan(plan)
    if html is not None:
        from rannc_backend.report.page import plan_page

        write_text(html, plan_page(loaded), what="page", named_by="--html")
        typer.echo(f"page written to {html}", err=True)
    if json:
        from rannc_backend.report.summary import plan_summary

        typer.echo(json_text.dumps(plan_summary(loaded), indent=2))
    elif html is None:
        from rannc_backend.report.tables import plan_report

        console = report_console()
        for section in plan_report(loaded):
            console.print(section)


def diff(
    a: PlanPath,
    b: Annotated[Path, typer.Argument(help="The plan to compare with.", show_default=False)],
    json: Annotated[
        bool, typer.Option("--json", help="Print the difference as JSON, with the values themselves.")
    ] = False,
) -> None:
    """Print what differs between two plans: settings, cluster, costs of stages, and what moved to another
    stage.
    """
    from rannc_backend.report.comparison import compare, difference_report

    difference = compare(read_plan(a), read_plan(b))
    if json:
        typer.echo(json_text.dumps(difference.summary(), indent=2, allow_nan=False))
        return
    console = report_console()
    for section in difference_report(difference, str(a), str(b)):
        console.print(section)


def simulate(
    plan: PlanPath,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help=f"One of {', '.join(schedule_names())}; default: the plan's.",
            show_default=False,
        ),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            "--micro-batches",
            metavar="N[,N...]",
            help="Numbers of micro-batches; default: the plan's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print a step of a plan in simulated time, as planned and with other settings, and a timeline of
    each.
    """
    from rannc_backend.report.timeline_text import guess_warning, simulation_table, timeline
    from rannc_backend.schedule.plan_simulation import simulate_plan

    loaded = read_plan(plan)
    settings = dict.fromkeys([(loaded.schedule, loaded.num_micro_batches)])
    wanted = _schedule(schedule, loaded)
    settings.update(dict.fromkeys((wanted, count) for count in _micro_batches(micro_batches, loaded)))
    simulations = [simulate_plan(loaded, *setting) for setting in settings]
    console = report_console()
    console.print(simulation_table(loaded, simulations))
    if warning := guess_warning(simulations):
        console.print(f"note: {warning}", style="yellow", markup=False, highlight=False)
    for simulation in simulations:
        console.print()
        for line in timeline(simulation, console.width):
            console.print(line, no_wrap=True, crop=False)


def report_console() -> Console:
    """A console for stdout that prints every name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of modules and bars may not exist in the encoding of a terminal: a "?" is better than no plan.
        sys.stdout.reconfigure(errors="replace")
    from rannc_backend.report.tables import stdout_console

    return stdout_console(highlight=False)


def _schedule(name: str | None, plan: Plan) -> ScheduleName:
    if name is None:
        return plan.schedule
    names = schedule_names()
    found = SCHEDULE_ALIASES.get(name, name)
    if found not in names:
        expected = f"one of {', '.join(names)}"
        raise OptionValueError(
            "--schedule", value=name, source="command line", expected=expected, choices=names
        )
    return found


def _micro_batches(text: str | None, plan: Plan) -> list[int]:
    """The numbers in "4,8,16", each one in which every replica gets a row and that is simulated in
    seconds.
    """
    from rannc_backend.schedule.plan_simulation import MAX_SPANS, most_micro_batches

    if text is None:
        return [plan.num_micro_batches]
    most = max(1, min(most_micro_batches(plan), MAX_SPANS // (2 * plan.num_stages)))
    words = [word.strip() for word in text.split(",")]
    if not all(
        word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= most for word in words
    ):
        expected = f"numbers from 1 to {most} (every replica gets a row), with commas between, as 4,8,16"
        raise OptionValueError("--micro-batches", value=text, source="command line", expected=expected)
    return [int(word) for word in words]
