"""`rannc verify train.py`: a few steps of the user's own script on its ranks beside one process.

In: the command line. Out: a table of steps and a sentence; exit code 0 where all agrees, 1 where something
differs, 2 where it could not be compared, with cause, place and cure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rannc_backend.doctor.host import find_devices
from rannc_backend.doctor.ranks import words_of_launch
from rannc_backend.errors import OptionValueError, VerificationError
from rannc_backend.report.tables import stdout_console
from rannc_backend.runtime.launch import without_launch
from rannc_backend.settings.user_files import UserFile, require_file
from rannc_backend.verify import launching
from rannc_backend.verify.launching import Listener, Verified
from rannc_backend.verify.settings import Difference, Mode, Result, VerifySettings

EXIT_DIFFERENT = 1
_SIDES: dict[Mode, str] = {"ranks": "with the backend", "reference": "one process, plain"}
_KINDS = ("output", "gradient", "parameter", "buffer")


def verify(
    script: Annotated[
        Path, typer.Argument(help="The training script, as python would run it.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments.", show_default=False)
    ] = None,
    np: Annotated[
        int | None,
        typer.Option(
            "--np", "-np", "-n", min=1, help="Number of ranks; default: GPUs, at least 2.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 3,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers", metavar="PATH=N", help="Keep N modules of this list, as transformer.h=2; repeatable."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float64", "own"],
        typer.Option("--dtype", help="auto: float64, or the script's own where it fails in float64."),
    ] = "auto",
    limit: Annotated[
        float, typer.Option("--timeout-seconds", min=1, help="Most seconds for each of the two runs.")
    ] = 600.0,
    launch: Annotated[
        str, typer.Option("--launch", help="How to start --np ranks, as 'mpirun -np 2 -hosts a,b'.")
    ] = "",
) -> None:
    """Run a few steps of a training script on its ranks and again in one process, and name the first value
    that differs.

    The script runs twice, as it is; options of this command come before it.
    """
    require_file(UserFile(path=script, what="script"))
    num_devices = len(find_devices().names)
    num_ranks = np or max(2, num_devices)
    settings = VerifySettings(
        script=str(script),
        arguments=tuple(arguments or ()),
        num_ranks=num_ranks,
        num_steps=steps,
        layers=_layers(layers or []),
        dtype="own" if dtype == "own" else "float64",
        limit_seconds=limit,
    )
    environ = without_launch(os.environ)
    if num_devices < num_ranks:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    console = stdout_console(140, highlight=False, soft_wrap=sys.stdout.isatty())
    command = launch_command(shutil.which("mpirun", path=environ.get("PATH")), num_ranks, launch)
    device = "CPU" if num_devices < num_ranks else "GPU"
    console.print(
        f"[bold]rannc verify {escape(script.name)}[/]: {steps} steps on {_ranks(num_ranks)} ({device}) "
        "beside one process"
    )
    try:
        verified = launching.verify(
            settings, command, environ, _Lines(console).listener(), may_use_own_dtype=dtype == "auto"
        )
    except VerificationError as error:
        if error.output:
            console.print(
                f"the last lines of the script:\n{_indented(error.output)}", style="dim", markup=False
            )
        raise
    print_verified(verified, console)
    raise typer.Exit(EXIT_DIFFERENT if verified.result.num_differences else 0)


def launch_command(mpirun: str | None, num_ranks: int, launch: str = "") -> list[str]:
    """What starts ranks of a job: as the user has said, else with mpirun, else with torchrun's launcher.

    Raises:
        OptionValueError: what the user has said is no command.
    """
    module = ["-m", "rannc_backend.verify.job"]
    if launch:
        return [*words_of_launch(launch), sys.executable, *module]
    if mpirun is not None:
        return [mpirun, "-np", str(num_ranks), sys.executable, *module]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        *module,
    ]


def _layers(texts: Sequence[str]) -> dict[str, int]:
    layers = {}
    for text in texts:
        path, _, number = text.rpartition("=")
        if not path or not number.isdecimal() or int(number) < 1:
            expected = (
                "PATH=N, a list of modules in the model and how many of them are kept, as transformer.h=2"
            )
            raise OptionValueError("--layers", value=text, source="command line", expected=expected)
        layers[path] = int(number)
    return layers


class _Lines:
    """One line per step of a job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0

    def listener(self) -> Listener:
        return Listener(begins=self._begins, step=self._step, again=self._again)

    def _begins(self, mode: Mode) -> None:
        self._told = 0
        self._console.print(f"  {_SIDES[mode]} ...", style="dim")

    def _step(self, mode: Mode, number: int) -> None:
        for step in range(self._told + 1, number + 1):
            self._console.print(f"  {_SIDES[mode]}: step {step}", style="dim")
        self._told = max(self._told, number)

    def _again(self, reason: str) -> None:
        self._console.print(f"  once more: {reason}", markup=False)


def print_verified(verified: Verified, console: Console) -> None:
    """What was compared, a table of the steps, what differs, and a sentence."""
    settings, result = verified.settings, verified.result
    dtype = "converted to float64" if settings.dtype == "float64" else "in the script's own dtypes"
    cut = ", ".join(f"{path} cut to {number}" for path, number in settings.layers.items())
    compared = f"{result.num_parameters:,} parameters, {dtype}{', ' if cut else ''}{cut}"
    lines = [("model", compared), ("plan", verified.plan or "unknown")]
    lines.append(("rounding", f"up to {result.tolerance:.1e} of a tensor's largest element{_why(result)}"))
    lines += [("note", note) for note in result.notes]
    console.print()
    for word, text in lines:
        console.print(f"{word:<9} {text}", markup=False, soft_wrap=True)
    console.print(_table(result))
    for difference in result.differences[:5]:
        console.print(f"[bold red]differs[/]   {escape(described(difference))}", soft_wrap=True)
    if result.num_differences > 5:
        console.print(f"          and {result.num_differences - 5} more")
    seconds = f"{verified.seconds['ranks']:.0f} s with the backend, {verified.seconds['reference']:.0f} s in one process"
    style = "bold red" if result.num_differences else "green"
    console.print(f"{diagnosis(verified)} ({seconds})", style=style, markup=False, soft_wrap=True)


def _why(result: Result) -> str:
    at = f", at {result.narrowest_at}" if result.narrowest_at else ""
    return "" if result.narrowest == "float64" else f" (the model computes in {result.narrowest}{at})"


def _table(result: Result) -> Table:
    kinds = [kind for kind in _KINDS if any(kind in step.largest for step in result.steps)]
    table = Table(
        "step",
        "loss, ranks",
        "loss, one process",
        *(f"{kind}s" for kind in kinds),
        title="Largest differences of each step",
    )
    table.title_justify = "left"
    for step in result.steps:
        here, there = (f"{value:.10g}" for value in step.loss) if step.loss else ("outside", "")
        found = [step.largest.get(kind) for kind in kinds]
        cells = [
            "" if largest is None else f"{largest.relative:.1e} {largest.name}" if largest.relative else "0"
            for largest in found
        ]
        table.add_row(str(step.number), here, there, *map(escape, cells))
    return table


def described(difference: Difference) -> str:
    """One difference in words."""
    where = f"step {difference.step}, call {difference.call}: {difference.kind} {difference.name}"
    if difference.rank >= 0:
        where += f" on rank {difference.rank}"
    if difference.problem:
        return f"{where}: {difference.problem}"
    element = f"element [{', '.join(map(str, difference.index))}] " if difference.index else ""
    allowed = difference.allowed / difference.scale if difference.scale else 0.0
    return (
        f"{where}: {element}is {difference.here:.10g}, in one process {difference.there:.10g}; the "
        f"difference is {difference.relative:.1e} of the largest element, where {allowed:.1e} may be rounding"
    )


def diagnosis(verified: Verified) -> str:
    """What the numbers mean, in a sentence."""
    result, ranks = verified.result, _ranks(verified.settings.num_ranks)
    counts = {kind: sum(step.num_compared.get(kind, 0) for step in result.steps) for kind in _KINDS}
    compared = ", ".join(
        f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items() if count
    )
    if result.num_differences:
        first = result.differences[0]
        at = f" on rank {first.rank}" if first.rank >= 0 else ""
        return f"DIFFERENT: the {first.kind} {first.name}{at}, in step {first.step}, is the first that is not what one process has"
    num_steps = sum(1 for step in result.steps if step.num_compared)
    ended = (
        ""
        if result.ended == "steps"
        else "; the script ended there"
        if result.ended == "script"
        else "; no optimizer went on"
    )
    return f"EQUAL: {compared} of {num_steps} step{'s' if num_steps != 1 else ''} on {ranks} are what one process has{ended}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
