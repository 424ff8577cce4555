"""`rannc config`: every option with its value and source, as a table, as JSON, or as the page
docs/configuration.md.

In: environment, `rannc_conf.toml`, the definitions of the items. Out: text on stdout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rannc_backend.cli.other_systems import SYSTEMS, as_toml, translated
from rannc_backend.report.tables import stdout_console
from rannc_backend.settings.accepted import accepted_values
from rannc_backend.settings.options import Config, environment_name
from rannc_backend.settings.rannc_items import RETIRED
from rannc_backend.settings.sources import CONFIG_FILE, ENVIRONMENT_ONLY, Resolution, resolve

_HEAD = f"""# Options

<!-- Written by `make docs` from rannc_backend/settings; do not edit. -->

Each option is a key of `torch.compile(model, backend="rannc", options={{...}})`, an environment variable `RANNC_<NAME IN CAPITALS>`,
and a line `name = value` of the file `{CONFIG_FILE}` in `RANNC_CONF_DIR` (`~/.pyrannc` without it).
The later wins: default, file, environment, `options`. A name that does not exist and a value out of range are errors that name the
file and line, or the variable. Every rank reads its own file, and ranks with different values are an error, but for paths and
what is logged, which are a rank's own (`cache_dir` on a disk of its host, say).
`rannc config` prints the values in force and where they come from; `rannc config --json` prints them for programs.
[Logging](logging.md) has a file of its own.

| option | default | accepts | meaning |
|---|---|---|---|
"""


def config(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="What --from reads: its items as TOML or JSON.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SYSTEM",
            help=f"Print the options for a configuration of {' or '.join(SYSTEMS)}, as TOML.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/configuration.md: defaults, not values.")
    ] = False,
) -> None:
    """Print every option with its value, where that comes from, and what it means; or what the configuration of another
    system is in these options.
    """
    if system is not None or file is not None:
        found = translated(system, file)
        typer.echo(json.dumps(found, indent=2) if as_json else as_toml(found))
        return
    if markdown:
        typer.echo(configuration_markdown(), nl=False)
        return
    resolution = resolve(None, os.environ)
    if as_json:
        typer.echo(json.dumps(configuration_values(resolution), indent=2))
        return
    table = Table(
        "option", "value", "source", "meaning", title="Options (torch.compile's options={...} come on top)"
    )
    for item, field in Config.model_fields.items():
        value = escape(repr(getattr(resolution.config, item)))
        table.add_row(item, value, escape(resolution.sources[item]), escape(field.description or ""))
    console = stdout_console(160)
    console.print(table)
    for line in (f"file: {resolution.file or 'none'}", *resolution.notices):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def configuration_values(resolution: Resolution) -> dict[str, Any]:
    """What `rannc config --json` prints."""
    return {
        "file": resolution.file,
        "items": {
            item: {
                "value": getattr(resolution.config, item),
                "source": resolution.sources[item],
                "default": field.default,
                "accepts": accepted_values(item),
                "meaning": field.description,
            }
            for item, field in Config.model_fields.items()
        },
        "retired": {
            item: {
                "source": resolution.retired.get(item),
                "accepts": retired.accepts,
                "instead": retired.instead,
            }
            for item, retired in RETIRED.items()
        },
    }


def configuration_markdown() -> str:
    """The text of docs/configuration.md."""
    lines = []
    for item, field in Config.model_fields.items():
        lines.append(
            _row(f"`{item}`", f"`{_shown(field.default)}`", accepted_values(item), field.description or "")
        )
    lines += ["", "Read from the environment alone:", ""]
    lines += [f"- `{variable}`: {meaning}" for variable, meaning in ENVIRONMENT_ONLY.items()]
    lines += [
        "",
        "## Items that change nothing",
        "",
        "RaNNC's, and `cuda_graphs` of earlier versions: they are accepted from the same sources and "
        "checked for their type; rank 0 says once what took their place.",
        "",
        "| item | default | accepts | what took its place |",
        "|---|---|---|---|",
    ]
    for item, retired in RETIRED.items():
        sentence = (
            retired.instead[0].upper() + retired.instead[1:]
            if retired.instead[0].isalpha()
            else retired.instead
        )
        lines.append(_row(f"`{item}`", f"`{_shown(retired.default)}`", retired.accepts, f"{sentence}."))
    example = environment_name("pipeline_num")
    return _HEAD + "\n".join(lines) + f"\n\n`{example}=4` and `pipeline_num = 4` in the file mean the same.\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(value: object) -> str:
    return repr(value).lower() if isinstance(value, bool) else repr(value)
