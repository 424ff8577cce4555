"""Writes the API reference from docstrings: `python -m scripts.api_reference [--output docs/api.md]`.

In: the names of `rannc_backend.__all__`. Out: Markdown with the signature and docstring of each, in sections
by the module that defines them. Docstrings are Google-style: a summary, paragraphs, and sections such as
`Args:` whose entries are `name: text`, with continuation lines.
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import rannc_backend

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/api.md"
MAX_SIGNATURE = 88

# Title of a section, and the modules whose names it has.
SECTIONS = {
    "Training": ("rannc_backend.api.functions", "rannc_backend.api.synchronized_modules"),
    "Loops": ("rannc_backend.api.loops", "rannc_backend.api.gathered"),
    "Checkpoints": ("rannc_backend.api.checkpoints", "rannc_backend.checkpoint.reader"),
    "Files of other libraries": (
        "rannc_backend.integrations.hugging_face",
        "rannc_backend.integrations.distributed_checkpoint",
    ),
    "Data": ("rannc_backend.api.data_slices",),
    "Deferred initialization": ("rannc_backend.api.materialize", "rannc_backend.api.record_model"),
    "Tracing and memory": ("rannc_backend.api.trace", "rannc_backend.api.memory"),
    "Custom operators": ("rannc_backend.passes.batch.row_wise",),
    "Recompute": ("rannc_backend.kernels.checkpoint_mark",),
    "Options and errors": ("rannc_backend.settings.options", "rannc_backend.errors.base"),
    "RaNNC": ("rannc_backend.pyrannc.rannc_module", "rannc_backend.pyrannc.tensor_coll"),
}
# The fields of these are their arguments, and have a page of their own.
WITHOUT_SIGNATURE = {"Config": "[Options](configuration.md) lists the fields."}
HEAD = """# API reference

The public names of `rannc_backend`, written from their docstrings by `make docs`. `torch.compile(model, backend="rannc")` needs none
of them, and no import of the package.

*Collective* functions must be called by all ranks, in the same order. A rank that calls something else at the same time is reported
as an error on all ranks. Exceptions are classes of `rannc_backend.errors`, explained in [troubleshooting](troubleshooting.md).
"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.+)$")


def reference() -> str:
    """The text of docs/api.md."""
    names = [name for name in rannc_backend.__all__ if name != "__version__"]
    parts = [HEAD]
    for title, modules in SECTIONS.items():
        inside = [name for name in names if getattr(rannc_backend, name).__module__ in modules]
        names = [name for name in names if name not in inside]
        parts.append(f"## {title}\n")
        parts += [_entry(name, getattr(rannc_backend, name)) for name in inside]
    assert not names, f"in no section of scripts/api_reference.py: {names}"
    return "\n".join(parts)


def _entry(name: str, item: Any) -> str:
    lines = [f"### {name}\n"]
    if name not in WITHOUT_SIGNATURE:
        prefix = "class " if inspect.isclass(item) else ""
        lines.append(f"```python\n{prefix}{signature(name, item)}\n```\n")
    lines.append(markdown(inspect.getdoc(item) or ""))
    if name in WITHOUT_SIGNATURE:
        lines.append(f"{WITHOUT_SIGNATURE[name]}\n")
    elif inspect.isclass(item) and (members := _members(item)):
        lines.append("| member | |\n|---|---|\n" + "".join(members))
    return "\n".join(lines)


def _members(cls: type) -> list[str]:
    """A row per public method and property that a class defines itself: its signature and its summary."""
    rows = []
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        shown = name if isinstance(member, property) else signature(name, function, most=10_000)
        summary = _code((inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "))
        rows.append(f"| `{shown}` | {summary} |\n".replace(" | None", " \\| None"))
    return rows


def signature(name: str, item: Any, *, most: int = MAX_SIGNATURE) -> str:
    """A signature as it is written in the source; a parameter per line where it is longer than `most`."""
    found = inspect.signature(item)
    parameters = [one for one in found.parameters.values() if one.name != "self"]
    texts: list[str] = []
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        texts.append(_parameter(one))
    returns = (
        "" if inspect.isclass(item) or found.return_annotation is found.empty else found.return_annotation
    )
    arrow = f" -> {_annotation(returns)}" if returns != "" else ""
    line = f"{name}({', '.join(texts)}){arrow}"
    if len(line) <= most:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){arrow}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    has_type = parameter.annotation is not parameter.empty
    text = f"{stars}{parameter.name}" + (f": {_annotation(parameter.annotation)}" if has_type else "")
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {parameter.default!r}" if has_type else f"{text}={parameter.default!r}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def markdown(docstring: str) -> str:
    """A Google-style docstring as Markdown: sections in bold, their entries as lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
            lines += [f"**{section}**", ""]
        elif not section or not line.startswith("    "):
            section = "" if line else section
            lines.append(_code(line))
        elif (entry := _ENTRY.match(line[4:])) and section != "Returns":
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {_code(entry[2])}")
        else:
            lines.append(_code(f"  {line.strip()}" if section != "Returns" else line.strip()))
    return "\n".join(lines).rstrip() + "\n"


def _code(text: str) -> str:
    """Double backquotes of docstrings as single ones."""
    return text.replace("``", "`")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.parse_args().output.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
