"""Runs graph passes and does the chores that no pass should do itself. Which passes there are, in their
order: order.py.

In: an `fx.GraphModule` and a pass. Out: what the pass gives, checked.
Terms: a *pass* takes a graph and gives back one that means the same (`GraphPass`), or several graphs and what
was found out on the way (`Pass`). A *fact* is something that holds for a graph ("no_assertions"); facts
travel with the graph module. The *runner* checks that a graph has the facts that a pass requires, lints,
recompiles what was changed in place, times, logs the change of operators at debug level, and (inside of
`dumping`) writes the graph's text before and after. A pass refuses a graph it cannot keep correct by raising
`PassError`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import fx

from rannc_backend.passes.graph_text import graph_text

logger = logging.getLogger(__name__)

_FACTS = "facts"


class PassError(Exception):
    """A graph cannot be transformed without changing what it computes.

    `node` is where it was seen (None when no single node is to blame), `reason` one sentence for the user
    that names the operator. The caller adds the user's source line from `node.meta["stack_trace"]`. `is_known`:
    whether the operator would change it, and it is not merely unknown what the operator does.
    """

    def __init__(self, node: fx.Node | None, reason: str, *, is_known: bool = True) -> None:
        where = "" if node is None else f"{node.format_node()}: "
        super().__init__(f"{where}{reason}")
        self.node = node
        self.reason = reason
        self.is_known = is_known


class Graphs(Protocol):
    """The result of a pass that gives several graphs, or one graph and what was found out."""

    def named_graphs(self) -> Mapping[str, fx.GraphModule]:
        """The graphs by the names of their parts ("" for the only one)."""
        ...


Result = TypeVar("Result")


class Pass(ABC, Generic[Result]):
    """One change to a graph, or an analysis of it, whose result lists its graphs (`Graphs`). Subclasses are
    frozen, slotted dataclasses whose fields are the options of the pass.

    A pass may change the given graph module in place or build another one, which it leaves compiled; it keeps
    no state between runs.
    """

    __slots__ = ()

    name: ClassVar[str]
    #: facts about the graph that earlier passes (or the caller) must have established / that this pass
    #: establishes / that hold no longer after it
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    ends: ClassVar[frozenset[str]] = frozenset()
    #: False: the pass looks at its graph only
    rewrites: ClassVar[bool] = True

    @abstractmethod
    def run(self, graph_module: fx.GraphModule) -> Result:
        """Give back what the graph becomes. Raises `PassError` when the graph must be refused."""

    def graphs(self, result: Any) -> Mapping[str, fx.GraphModule]:
        """The graphs of a result by the names of their parts."""
        return result.named_graphs()


class GraphPass(Pass[fx.GraphModule]):
    """A pass from one graph to one graph."""

    __slots__ = ()

    def graphs(self, result: fx.GraphModule) -> Mapping[str, fx.GraphModule]:
        return {"": result}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: wall time and the change in the number of calls of each operator (zero changes left
    out).
    """

    name: str
    seconds: float
    op_count_change: dict[str, int]

    def __str__(self) -> str:
        changes = ", ".join(f"{op} {count:+d}" for op, count in sorted(self.op_count_change.items()))
        return f"{self.name}: {self.seconds * 1e3:.1f} ms; {changes or 'no change of operators'}"


def facts_of(graph_module: fx.GraphModule) -> frozenset[str]:
    """What is known to hold for a graph."""
    return frozenset(graph_module.meta.get(_FACTS, ()))


def with_facts(graph_module: fx.GraphModule, facts: Iterable[str]) -> fx.GraphModule:
    """The same graph module, for which exactly these facts hold: for graphs that come from elsewhere, and
    copies.
    """
    # Sorted: Inductor's cache takes the module's notes for a part of the graph.
    graph_module.meta[_FACTS] = tuple(sorted(facts))
    return graph_module


def run_pass(graph_pass: Pass[Result], graph_module: fx.GraphModule) -> Result:
    """Run one pass. Raises `PassError` from it, AssertionError where the graph lacks a fact that it
    requires.
    """
    return _run(graph_pass, graph_module)[0]


def run_passes(
    graph_module: fx.GraphModule, passes: Sequence[GraphPass]
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Run passes from graph to graph in order; errors as of `run_pass`."""
    reports: list[PassReport] = []
    for graph_pass in passes:
        graph_module, report = _run(graph_pass, graph_module)
        reports.append(report)
    return graph_module, tuple(reports)


def _run(graph_pass: Pass[Result], graph_module: fx.GraphModule) -> tuple[Result, PassReport]:
    facts = facts_of(graph_module)
    missing = graph_pass.requires - facts
    assert not missing, (
        f"pass {graph_pass.name} requires {sorted(missing)}, which no earlier pass provides; the graph has "
        f"{sorted(facts)}"
    )
    dump = _DUMP.get()
    if dump is not None:
        dump.before(graph_pass.name, graph_module)
    before = count_ops(graph_module)
    start_seconds = time.perf_counter()
    result = graph_pass.run(graph_module)
    graphs = graph_pass.graphs(result)
    known = (facts - graph_pass.ends) | graph_pass.provides
    after: Counter[str] = Counter()
    for made in graphs.values():
        if graph_pass.rewrites:
            made.graph.lint()
        if graph_pass.rewrites and made is graph_module:
            made.recompile()
        with_facts(made, known)
        after += count_ops(made)
    report = PassReport(
        name=graph_pass.name,
        seconds=time.perf_counter() - start_seconds,
        op_count_change=_difference(before, after),
    )
    logger.debug("%s", report)
    if dump is not None:
        dump.after(graph_pass.name, graphs)
    return result, report


def count_ops(graph_module: fx.GraphModule) -> Counter[str]:
    """Number of calls of each operator, by name; placeholders, attributes and the output are not counted."""
    return Counter(str(node.target) for node in graph_module.graph.nodes if node.op.startswith("call_"))


def _difference(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    ops = set(before) | set(after)
    return {op: after[op] - before[op] for op in sorted(ops) if after[op] != before[op]}


# --- the graphs as text


@dataclass(slots=True, kw_only=True)
class GraphDump:
    """Where the texts of graphs go: `write` takes the name of a file and its text.

    The files of a pass are `<number>_<pass>_before.txt`, left out where it is the text written last, and then
    `<number>_<pass>.txt` or, per part, `<number>_<pass>_<part>.txt`. Numbers count the passes that have run.
    """

    write: Callable[[str, str], None]
    number: int = 0
    _last: str = field(init=False, default="")

    def before(self, name: str, graph_module: fx.GraphModule) -> None:
        self.number += 1
        self._write(f"{self.number:02d}_{name}_before.txt", graph_text(graph_module), skip=(self._last,))

    def after(self, name: str, graphs: Mapping[str, fx.GraphModule]) -> None:
        for part, graph_module in graphs.items():
            end = f"_{part}" if part else ""
            self._write(f"{self.number:02d}_{name}{end}.txt", graph_text(graph_module))

    def _write(self, name: str, text: str, skip: Collection[str] = ()) -> None:
        if text not in skip:
            self.write(name, text)
        self._last = text


_DUMP: ContextVar[GraphDump | None] = ContextVar("graph_dump", default=None)


@contextlib.contextmanager
def dumping(dump: GraphDump | None) -> Iterator[None]:
    """Inside, every pass writes its graphs to `dump`; None: to nowhere."""
    token = _DUMP.set(dump)
    try:
        yield
    finally:
        _DUMP.reset(token)


def with_dump_of_now(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, whose passes write to where passes write now, whenever it is called."""
    dump = _DUMP.get()
    if dump is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        with dumping(dump):
            return function(*args, **kwargs)

    return run
