"""`docs/models.md`, written from the outcomes of the zoo (`outcomes.json`)."""

from __future__ import annotations

import collections
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.zoo.entries import Entry

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
_ORDER = ("exact", "narrow", "differs", "refused", "crashed", "not built")
_BEGIN, _END = "<!-- zoo: written by tests/benchmarks/model_zoo.py -->", "<!-- end of zoo -->"
_DETAIL_LENGTH = 160


def read_outcomes() -> dict[str, Any]:
    """What was found so far, by the text of an entry."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}


def document(entries: Iterable[Entry], outcomes: Mapping[str, Any]) -> None:
    """Write the tables between the page's two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{tables(list(entries), outcomes)}\n{_END}{after}", encoding="utf-8")


def tables(entries: list[Entry], outcomes: Mapping[str, Any]) -> str:
    """A summary by library, and a line per model."""
    tried = [entry for entry in entries if str(entry) in outcomes]
    lines = [
        "",
        f"{len(tried)} of the {len(entries)} models in the list have been tried.",
        "",
        "| library | " + " | ".join(_ORDER) + " |",
        "|---|" + "---|" * len(_ORDER),
    ]
    libraries = sorted({entry.library for entry in entries})
    for library in [*libraries, "all"]:
        counts = collections.Counter(
            outcomes[str(entry)]["outcome"] for entry in tried if library in (entry.library, "all")
        )
        lines.append(f"| {library} | " + " | ".join(str(counts[kind]) for kind in _ORDER) + " |")
    seconds = [outcomes[str(entry)]["cpu_seconds"] for entry in tried if outcomes[str(entry)]["cpu_seconds"]]
    normed = sum(
        outcomes[str(entry)]["has_batch_norm"] and outcomes[str(entry)]["outcome"] in ("exact", "narrow")
        for entry in tried
    )
    if seconds:
        lines += [
            "",
            f"CPU seconds of the first call per rank: median {statistics.median(seconds):.1f}, "
            f"worst {max(seconds):.1f}. {normed} of the exact and narrow models have batch normalization: with "
            "`batch_norm` left at its default they differ by the rule stated in [semantics](semantics.md).",
        ]
    lines += ["", "| model | outcome | detail |", "|---|---|---|"]
    for entry in sorted(tried, key=str):
        found = outcomes[str(entry)]
        lines.append(f"| {entry} | {found['outcome']} | {_short(found['detail'])} |")
    return "\n".join([*lines, ""])


def _short(text: str) -> str:
    text = re.sub(r"\S*/site-packages/", "", text).replace("|", "/")
    return text if len(text) <= _DETAIL_LENGTH else text[: _DETAIL_LENGTH - 1] + "…"
