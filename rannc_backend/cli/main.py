"""The command `rannc`: options, plans and programs as text, without starting any rank.

In: command line, environment, plan files. Out: text on stdout. Our own errors end with exit code 2 and no
traceback.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

import rannc_backend
from rannc_backend.cli import plan as cli_plan
from rannc_backend.cli import show as cli_show
from rannc_backend.cli.config import config
from rannc_backend.cli.doctor import doctor
from rannc_backend.cli.errors import errors
from rannc_backend.cli.show import PlanPath
from rannc_backend.cli.verify import verify
from rannc_backend.errors import OptionValueError, RanncError
from rannc_backend.ir.action import INPUT, format_programs
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.ir.plan_file import read_plan
from rannc_backend.runtime.job.disabled_compile import disabling_variables
from rannc_backend.schedule.edges import EdgeSpec, Phase, chain_edges
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.orders import order_on
from rannc_backend.schedule.plan_simulation import schedule_of
from rannc_backend.settings.options import environment_name
from rannc_backend.settings.rare_collections import rare_collections

EXIT_USER_ERROR = 2

app = typer.Typer(
    name="rannc",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command("config")(config)
app.command("doctor")(doctor)
app.command("errors")(errors)
app.command("plan")(cli_plan.plan)
app.command("show")(cli_show.show)
app.command("diff")(cli_show.diff)
app.command("simulate")(cli_show.simulate)
# What follows the script is the script's.
app.command("verify", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(
    verify
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    for name in disabling_variables(os.environ):
        Console(stderr=True, soft_wrap=True).print(
            f"rannc: warning: {name}=1 switches torch.compile off", style="yellow", highlight=False
        )
    try:
        with rare_collections():
            app(args=None if arguments is None else list(arguments), prog_name="rannc")
    except RanncError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"rannc: {error}", style="red", markup=False, highlight=False
        )
        sys.exit(EXIT_USER_ERROR)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def common(
    is_asked: Annotated[
        bool,
        typer.Option("--version", help="Print versions and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Show the options, plans and programs of the torch.compile backend 'rannc'."""


@app.command()
def version() -> None:
    """Print the version of rannc-backend and of torch."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "not installed"
    typer.echo(f"rannc-backend {rannc_backend.__version__} (torch {torch_version})")


@app.command()
def program(
    plan: PlanPath,
    rank: Annotated[int, typer.Option("--rank", help="Whose program.", show_default=False)],
    phase: Annotated[Phase, typer.Option("--phase", help="What one call does.")] = "train",
) -> None:
    """Print the actions of one rank in one call, as the plan alone determines them."""
    loaded = read_plan(plan)
    if not 0 <= rank < loaded.world_size:
        expected = f"an integer from 0 to {loaded.world_size - 1}, the ranks of this plan"
        raise OptionValueError("--rank", value=rank, source="command line", expected=expected)
    stages = loaded.stages_of_rank(rank)
    if not stages:
        typer.echo(f"# rank {rank} has no stage in this plan")
        return
    order = order_on(schedule_of(loaded), loaded.lanes, loaded.num_micro_batches)
    programs = lower_lanes(order, _chain(loaded.num_stages), phase, loaded.num_micro_batches)
    typer.echo(
        f"# rank {rank}, {lane_text(stages)}, phase {phase}. Assumed: each stage feeds the next, and no other."
    )
    typer.echo(
        f"# {environment_name('print_program')}=1 logs the programs of a run, with the model's own edges."
    )
    lane = loaded.lanes.index(stages)
    typer.echo(format_programs({lane: programs[lane]}), nl=False)


def _chain(num_stages: int) -> list[EdgeSpec]:
    return [EdgeSpec(src=INPUT, dst=0, num_forward_values=1), *chain_edges(num_stages)]


if __name__ == "__main__":
    main()
