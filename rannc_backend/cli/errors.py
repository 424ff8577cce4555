"""`rannc errors`: what an error means and what to change, or all of them as the page docs/troubleshooting.md.

In: the name of an error class. Out: text on stdout.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rannc_backend.errors import OptionValueError
from rannc_backend.errors.catalogue import SYMPTOMS, classes_of, errors_markdown, section_of


def errors(
    name: Annotated[
        str, typer.Argument(help="A class, as ModelDevicesError; left out: all names.", show_default=False)
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/troubleshooting.md.")] = False,
) -> None:
    """Say what an error means, with which texts it is raised, and what to change."""
    if markdown:
        typer.echo(errors_markdown(), nl=False)
        return
    classes = {cls.__name__: cls for module in SYMPTOMS for cls in classes_of(module)}
    if name and name not in classes:
        expected = "the name of an error, of which `rannc errors` prints all"
        raise OptionValueError("NAME", value=name, source="command line", expected=expected, choices=classes)
    if name:
        typer.echo(section_of(classes[name]))
        return
    for module, symptom in SYMPTOMS.items():
        typer.echo(f"{symptom}:")
        for cls in classes_of(module):
            typer.echo(f"  {cls.__name__}")
