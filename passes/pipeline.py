"""Runs graph passes one after the other and does the chores that no pass should do itself.

In: an `fx.GraphModule` and an ordered list of passes. Out: the transformed `fx.GraphModule` and one `PassReport` per pass.
Terms: a *pass* takes a graph and gives back a graph that means the same; the *runner* lints, recompiles, times and (if asked)
writes the graph's text before and after. A pass refuses a graph it cannot keep correct by raising `PassError`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import fx

logger = logging.getLogger(__name__)


class PassError(Exception):
    """A graph cannot be transformed without changing what it computes.

    `node` is where it was seen (None when no single node is to blame), `reason` one sentence for the user that names the
    operator. The caller adds the user's source line from `node.meta["stack_trace"]`.
    """

    def __init__(self, node: fx.Node | None, reason: str) -> None:
        where = "" if node is None else f"{node.format_node()}: "
        super().__init__(f"{where}{reason}")
        self.node = node
        self.reason = reason


class GraphPass(ABC):
    """One change to a graph. Subclasses are frozen, slotted dataclasses whose fields are the options of the pass.

    A pass may change the given graph module in place or build another one; it keeps no state between runs.
    """

    __slots__ = ()

    name: ClassVar[str]
    #: facts about the graph that an earlier pass (or the caller) must have established / that this pass establishes
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Give back the transformed graph. Raises `PassError` when the graph must be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: wall time and the change in the number of calls of each operator (zero changes left out)."""

    name: str
    seconds: float
    op_count_change: dict[str, int]

    def __str__(self) -> str:
        changes = ", ".join(f"{op} {count:+d}" for op, count in sorted(self.op_count_change.items()))
        return f"{self.name}: {self.seconds * 1e3:.1f} ms; {changes or 'no change of operators'}"


def run_passes(
    graph_module: fx.GraphModule,
    passes: Sequence[GraphPass],
    *,
    provided: frozenset[str] = frozenset(),
    dump_folder: Path | None = None,
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Run `passes` in order; after each one the graph is linted and recompiled.

    `provided` are the facts that hold for the given graph already. With `dump_folder` the text of the graph is written
    there as `<number>_<pass>.txt`, number 00 being the graph as given. Raises `PassError` from a pass, AssertionError
    when a pass's requirement is not provided by an earlier one.
    """
    facts = set(provided)
    reports: list[PassReport] = []
    _dump(graph_module, dump_folder, 0, "input")
    for number, graph_pass in enumerate(passes, start=1):
        missing = graph_pass.requires - facts
        assert not missing, f"pass {graph_pass.name} requires {sorted(missing)}, which no earlier pass provides"
        before = count_ops(graph_module)
        start_seconds = time.perf_counter()
        graph_module = graph_pass.run(graph_module)
        graph_module.graph.lint()
        graph_module.recompile()
        seconds = time.perf_counter() - start_seconds
        facts |= graph_pass.provides
        report = PassReport(
            name=graph_pass.name, seconds=seconds, op_count_change=_difference(before, count_ops(graph_module))
        )
        reports.append(report)
        logger.debug("%s", report)
        _dump(graph_module, dump_folder, number, graph_pass.name)
    return graph_module, tuple(reports)


def count_ops(graph_module: fx.GraphModule) -> Counter[str]:
    """Number of calls of each operator, by name; placeholders, attributes and the output are not counted."""
    return Counter(str(node.target) for node in graph_module.graph.nodes if node.op.startswith("call_"))


def _difference(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    ops = set(before) | set(after)
    return {op: after[op] - before[op] for op in sorted(ops) if after[op] != before[op]}


def _dump(graph_module: fx.GraphModule, folder: Path | None, number: int, name: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(str(graph_module.graph) + "\n")
