"""`rannc doctor`: whether training can run here, and what to mend.

In: this host. Out: a table, or JSON; exit code 1 where there is a problem. Starts ranks itself, unless told
not to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import rannc_backend
from rannc_backend.doctor.findings import Finding
from rannc_backend.doctor.host import find_devices, host_findings
from rannc_backend.doctor.ranks import launch_command, rank_environment, rank_findings, run_job
from rannc_backend.doctor.report import report_file, write_report
from rannc_backend.report.tables import stdout_console
from rannc_backend.settings.user_files import require_writable

EXIT_PROBLEM = 1
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks/--no-ranks", help="Start ranks: connections, messages, abort, a training step."
        ),
    ] = True,
    limit: Annotated[
        float, typer.Option("--limit", min=1, help="Most seconds for each of the three jobs of ranks.")
    ] = 120.0,
    report: Annotated[
        str,
        typer.Option("--report", help="Write all that a maintainer needs into this file (.json: as JSON)."),
    ] = "",
    launch: Annotated[
        str,
        typer.Option(
            "--launch", help="How to start ranks, as 'mpirun -np 2 -hosts a,b' or 'srun -N 2 -n 2'."
        ),
    ] = "",
) -> None:
    """Look at versions, devices, environment, memory and limits, try two ranks, and say what is wrong and how
    to mend it.
    """
    if report:
        require_writable(report_file(report))
    findings = list(
        _shown(_all_findings(os.environ, ranks=ranks, limit_seconds=limit, launch=launch), quiet=as_json)
    )
    if as_json:
        typer.echo(json.dumps(findings_json(findings), indent=2))
    else:
        print_findings(findings)
    if report:
        write_report(report, findings, os.environ)
        told = f"report: {report}; what looks secret is left out, but read it before you send it to anybody."
        Console(stderr=True, soft_wrap=True).print(told, markup=False, highlight=False)
    raise typer.Exit(exit_code(findings))


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or 1 where there is a problem; warnings are none."""
    return EXIT_PROBLEM if any(finding.status == "problem" for finding in findings) else 0


def findings_json(findings: Sequence[Finding]) -> dict[str, object]:
    """What `rannc doctor --json` prints."""
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
    return {
        "version": rannc_backend.__version__,
        "counts": counts,
        "findings": [asdict(finding) for finding in findings],
    }


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """A table of what was found, and below it what to mend."""
    console = console or stdout_console(140)
    table = Table(
        "check", "", "found", title=f"rannc doctor {rannc_backend.__version__}", title_justify="left"
    )
    for finding in findings:
        table.add_row(
            escape(finding.name), f"[{_STYLES[finding.status]}]{finding.status}[/]", escape(finding.text)
        )
    console.print(table)
    for finding in findings:
        if finding.cure:
            style = _STYLES[finding.status]
            console.print(
                f"[{style}]{finding.status}[/] {escape(finding.name)}: {escape(finding.cure)}",
                soft_wrap=True,
                highlight=False,
            )
    problems = sum(finding.status == "problem" for finding in findings)
    console.print(
        "training can run here."
        if not problems
        else f"{problems} problem{'s' if problems > 1 else ''} to mend."
    )


def _all_findings(
    environ: Mapping[str, str], *, ranks: bool, limit_seconds: float, launch: str = ""
) -> Iterator[Finding]:
    command = launch_command(shutil.which("mpirun", path=environ.get("PATH")), launch)
    found = []
    for finding in host_findings(environ):
        found.append(finding)
        yield finding
    # Without torch there is no rank.
    if ranks and not any(finding.name == "torch" and finding.status == "problem" for finding in found):
        child = rank_environment(environ, num_devices=2 if launch else len(find_devices().names))
        yield from rank_findings(lambda task: run_job(task, command, child, limit_seconds=limit_seconds))


def _shown(findings: Iterable[Finding], *, quiet: bool) -> Iterator[Finding]:
    """The findings, with a line on the terminal that says what was looked at last."""
    console = Console(stderr=True)
    with nullcontext() if quiet or not sys.stderr.isatty() else console.status("looking ...") as status:
        for finding in findings:
            if status is not None:
                status.update(f"{escape(finding.name)}: {finding.status} ...")
            yield finding
